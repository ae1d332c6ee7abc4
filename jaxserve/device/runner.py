"""The runner: parameters, KV pools and compiled steps on a mesh, behind `plan.Runner`.

Owns device memory and the compiled programs. Knows neither requests, text nor the event loop.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.device import compile_counter
from jaxserve.device.abstract import abstract_state, initial_state
from jaxserve.device.adapters import AdapterSlots, abstract_adapters
from jaxserve.device.buckets import FIXED_PLACES, Bucket, bucket_for_plan, enumerate_buckets, num_samples
from jaxserve.device.compiler import release_freed_memory, step_options, uses_onednn
from jaxserve.device.constrained import ConstrainedSampling
from jaxserve.device.host_pages import HostPages
from jaxserve.device.layer_memory import has_stacked_step, layer_memory, stacked_abstract
from jaxserve.device.pack import abstract_upload, pack
from jaxserve.device.prepare import Preparation
from jaxserve.device.sampler import Sampled, choose_draw, sample
from jaxserve.device.scoring import unpack_columns
from jaxserve.device.step import DeviceState, StepOutput, jit_step, make_step, num_top_logprobs
from jaxserve.model_config import ModelConfig
from jaxserve.models.families import FAMILIES
from jaxserve.models.moe import lay_out
from jaxserve.models.quant import WeightForm, held_params
from jaxserve.plan import Masks, PlanRow, RunnerLimits, StepPlan, StepResult, StepStats
from jaxserve.request import TokenLogprobs
from pallas_kernels.paged_attention import IMPLEMENTATIONS

logger = logging.getLogger(__name__)

COMPILE_THREADS = 2
WARM_UP_TOKENS = 64
"""Steps of more tokens are not run at warm-up, where they would take as long as a prompt does; but for those of weights in
eight bits, of which the first run takes some seconds on CPU, since the library that multiplies them prepares itself then."""


@dataclass(slots=True)
class DeviceStep:
    """A dispatched step; see `plan.StepHandle`.

    Attributes:
        choose: samples the rows that have a mask; None where no row may have one.
    """

    plan: StepPlan
    places: list[int | None]
    output: StepOutput
    num_top: int
    submit_seconds: float
    choose: Callable[[Masks], StepOutput] | None = None

    def constrain(self, masks: Masks) -> None:
        """See `plan.StepHandle`."""
        assert self.choose is not None, "constrained twice, or without constrained rows"
        choose, self.choose = self.choose, None
        self.output = choose(masks)

    def result(self) -> StepResult:
        """Wait for the step and read what it sampled."""
        started = time.perf_counter()
        values = np.asarray(self.output.sampled)
        wait_seconds = time.perf_counter() - started
        tokens = values[:, 0].tolist()
        sampled = [() if place is None else (tokens[place],) for place in self.places]
        logprobs = [self._logprobs(row, values, place) for row, place in zip(self.plan.rows, self.places, strict=True)]
        stats = StepStats(submit_seconds=self.submit_seconds, wait_seconds=wait_seconds)
        return StepResult(self.plan.step_id, tuple(sampled), tuple(logprobs), stats, self._scores(), self._hidden())

    def _scores(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        asking = [row for row in self.plan.rows if row.targets]
        if not asking:
            return {}
        values, start = np.asarray(self.output.scores), 0
        scores = {}
        for row in asking:
            mine = values[start : start + len(row.targets)]
            scores[row.seq_id] = unpack_columns(mine, row.params.prompt_logprobs or 0, self.num_top)
            start += len(row.targets)
        return scores

    def _hidden(self) -> dict[int, tuple[float, ...]]:
        pairs = zip(self.plan.rows, self.places, strict=True)
        asking = [(row, place) for row, place in pairs if place is not None and row.params.max_tokens == 0]
        if not asking:
            return {}
        values = np.asarray(self.output.hidden)
        return {row.seq_id: tuple(values[place].tolist()) for row, place in asking}

    def _logprobs(self, row: PlanRow, values: np.ndarray, place: int | None) -> tuple[TokenLogprobs, ...]:
        wanted = row.params.logprobs
        if wanted is None or place is None:
            return ()
        floats = values[place].view(np.float32)
        ids = values[place, 2 : 2 + wanted].tolist()
        top = floats[2 + self.num_top : 2 + self.num_top + wanted].tolist()
        return (TokenLogprobs(float(floats[1]), tuple(zip(ids, top, strict=True))),)


@dataclass(frozen=True, slots=True)
class Weights:
    """What a runner needs of a checkpoint, on its mesh.

    Attributes:
        params: as `DeviceRunner.abstract_params` describes them.
        kv_scales: for pools in eight bits, as `kv_scales` makes them; else None.
    """

    params: Any
    kv_scales: jax.Array | None = None


class DeviceRunner:
    """Runs plans on a mesh. One thread drives it; `warm_up` must have returned first.

    Args:
        dtype: of parameters and activations.
        kv_dtype: of the KV pools.
        attention_options: tuned ones, as `paged_attention.schedule` has them.
        experts_impl: of `grouped_matmul`, for models with experts.
        weight_form: how matrices are kept; None for `dtype`.

    Attributes:
        abstract_params: the tree of `jax.ShapeDtypeStruct` with shardings that the parameters come as, see `held_params`; the
            runner then lays out experts as `experts_impl` wants them.
        layer_memory: where layers had best be made, in place; None where it matters not.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        limits: RunnerLimits,
        dtype: np.dtype,
        kv_dtype: np.dtype,
        attention_impl: str,
        attention_options: Mapping[str, int] | None = None,
        experts_impl: str = "xla",
        weight_form: WeightForm | None = None,
    ) -> None:
        compile_counter.start_counting()
        self._config = config
        self._mesh = mesh
        self._limits = limits
        # A step in which no row has an adapter runs the program of a runner without any.
        self._plain_limits = dataclasses.replace(limits, max_adapters=0, max_adapter_rank=0)
        self._dtype = dtype
        self.weight_form = weight_form
        self._product_dtype = dtype if weight_form is None else np.dtype(np.int8)
        self.attention_impl = attention_impl
        self._attention_options = attention_options
        self._experts_impl = experts_impl
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._kv_dtype = kv_dtype
        self.abstract_params = held_params(FAMILIES[config.family].specs(config), mesh, dtype, weight_form)
        platform = mesh.devices.flat[0].platform
        self._shares_pools = platform == "cpu" and IMPLEMENTATIONS[attention_impl].takes_first_page
        self._abstract_state = abstract_state(config, limits, mesh, kv_dtype, attention_impl, shared_pools=self._shares_pools)
        is_plain = weight_form is None and self._shares_pools
        self.layer_memory = layer_memory(config, self.abstract_params, mesh.size, platform) if is_plain else None
        self._params: Any = None
        self._stacked_params: Any = None
        self._state: DeviceState
        self._preparation: Preparation
        self._host_pages: HostPages | None = None
        self._adapters: AdapterSlots | None = None
        self._buckets = enumerate_buckets(limits)
        self._steps: dict[tuple[Bucket, int], Any] = {}  # by the shape, and how many adapters there are
        self._constrained: dict[int, ConstrainedSampling] = {}
        draw_impl, reason = choose_draw(platform, config.vocab_size)
        logger.info("sampling: %s, since %s", draw_impl, reason)
        self._draw_impl = draw_impl
        self._choose = partial(sample, draw_impl=draw_impl)
        self._compiles_when_ready = 0

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Every shape that a step can have."""
        return self._buckets

    @property
    def fixed_places(self) -> float | None:
        """As `host.sizes.StepSizes` has it; None where the size of a step matters little."""
        return FIXED_PLACES.get(self._mesh.devices.flat[0].platform)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all KV pools over all devices."""
        return sum(math.prod(pool.shape) * pool.dtype.itemsize for pool in self._abstract_state.pools)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters over all devices."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.abstract_params))

    @property
    def compiles_since_ready(self) -> int:
        """Programs compiled after `warm_up` returned, by this process: more than 0 is a bug."""
        return compile_counter.num_compiles() - self._compiles_when_ready

    def warm_up(self, load: Callable[[], Weights], progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every bucket, some at a time, while `load` brings the weights; run the small ones to fault in what is lazy.

        The pools come when all is compiled, so that what compiling takes for a while is not on top of them.

        Args:
            progress: called with programs done and in all.
        """
        # Those that no cache can give take longest, so they start first; then the largest, which take most memory to compile,
        # while there is least of what has been compiled.
        order = sorted(
            self._programs(),
            key=lambda p: (uses_onednn(p[0], self._product_dtype), p[0].has_chunks, p[0].num_tokens),
            reverse=True,
        )
        pool = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="compile")
        try:
            compiling = {pool.submit(self._compile, *program): program for program in order}
            preparation = pool.submit(Preparation, self._abstract_state, self._limits, self._everywhere)
            host_pages = pool.submit(self._make_host_pages)
            adapters = pool.submit(self._make_adapters)
            nums_sampled = sorted({num_samples(bucket, self._limits) for bucket in self._buckets})
            constrained = {num: pool.submit(self._compile_constrained, num) for num in nums_sampled}
            weights = load()
            kv_scales = weights.kv_scales
            for done, future in enumerate(as_completed(compiling), start=1):
                bucket, limits = compiling[future]
                self._steps[bucket, limits.max_adapters] = future.result()
                release_freed_memory()
                if progress is not None:
                    progress(done, len(order))
            self._preparation, self._host_pages = preparation.result(), host_pages.result()
            self._adapters = adapters.result()
            self._constrained = {num: future.result() for num, future in constrained.items()}
            release_freed_memory()
        finally:
            # Whoever interrupts this does not want to wait for what has not begun.
            pool.shutdown(wait=False, cancel_futures=True)
        self._hold(weights.params)
        del weights
        self._state = self._empty_state(kv_scales)
        for bucket, limits in self._programs():
            if bucket.num_tokens <= WARM_UP_TOKENS or self.weight_form is not None:
                plan = StepPlan(-1, ())
                output = self._dispatch(bucket, limits, pack(plan, bucket, limits)[0])
                self._constrain(plan, [], output, ()).sampled.block_until_ready()
        self._compiles_when_ready = compile_counter.num_compiles()

    def time_variant(
        self, bucket: Bucket, attention_impl: str, choose: Callable[..., Sampled], *, num_steps: int, rounds: int
    ) -> list[float]:
        """Seconds per step of a variant of `bucket`'s program, run back to back on empty rows, for each round.

        For benchmarks: compiles, and leaves the slots' state meaningless, so no sequence may be live.
        """
        limits = self._plain_limits
        step = make_step(self._config, limits, bucket, attention_impl, choose, experts_impl=self._experts_impl)
        step = self._compile_step(step, bucket, limits)
        uploaded = jax.device_put(pack(StepPlan(-1, ()), bucket, limits)[0], self._everywhere)
        seconds = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            for _ in range(num_steps):
                self._state, result = step(self._params_of(bucket, limits), self._state, uploaded)
            result.sampled.block_until_ready()
            seconds.append((time.perf_counter() - started) / num_steps)
        return seconds[1:]

    def _hold(self, params: Any) -> None:
        self._params = lay_out(params, self._experts_impl)
        if self.layer_memory is not None:
            self._params, self._stacked_params = self.layer_memory.adopt(self._params)

    def submit(self, plan: StepPlan) -> DeviceStep:
        """Pack and dispatch `plan` without waiting for it."""
        started = time.perf_counter()
        self._prepare(plan)
        bucket = bucket_for_plan(self._buckets, plan)
        limits = self._limits if any(row.adapter >= 0 for row in plan.rows) else self._plain_limits
        packed, places = pack(plan, bucket, limits)
        output = self._dispatch(bucket, limits, packed)
        choose = partial(self._constrain, plan, places, output) if any(row.masked for row in plan.rows) else None
        return DeviceStep(plan, places, output, num_top_logprobs(self._config), time.perf_counter() - started, choose)

    def place_adapter(self, weights: Any) -> Any:
        """`weights`, as `models.adapters.arrange` has them, on the devices, for `install_adapter`. Any thread may call it."""
        assert self._adapters is not None, "an adapter for a runner without slots"
        return self._adapters.place(weights)

    def install_adapter(self, slot: int, placed: Any) -> None:
        """Have rows of later plans that name `slot` computed with what `place_adapter` gave."""
        assert self._adapters is not None, f"an adapter for slot {slot} of a runner without any"
        self._adapters.install(slot, placed)

    def _constrain(self, plan: StepPlan, places: list[int | None], output: StepOutput, masks: Masks) -> StepOutput:
        sampling = self._constrained[output.logits.shape[1]]
        slots, sampled = sampling(self._state.slots, output.logits, output.sampled, plan, places, masks)
        self._state = dataclasses.replace(self._state, slots=slots)
        return dataclasses.replace(output, sampled=sampled)

    def _prepare(self, plan: StepPlan) -> None:
        host_pages = self._host_pages
        assert host_pages is not None or not (plan.saves or plan.loads), "a plan moves pages to or from a host without slots"
        if plan.saves and host_pages is not None:
            host_pages.save(self._state.pools, plan.saves)
        self._state = self._preparation.prepare(self._state, plan)
        if plan.loads and host_pages is not None:
            self._state = dataclasses.replace(self._state, pools=host_pages.load(self._state.pools, plan.loads))

    def time_loads(self) -> dict[int, float]:
        """Seconds that pages take from host memory to the device, by how many go at once. Writes over pages, so no sequence
        may be live, nor any page hold what will be read. There must be `limits.host_pages`."""
        assert self._host_pages is not None, "a runner without host pages"
        pools, seconds = self._host_pages.time_loads(self._state.pools)
        self._state = dataclasses.replace(self._state, pools=pools)
        return seconds

    def _make_host_pages(self) -> HostPages | None:
        return HostPages(self._abstract_state, self._limits.host_pages) if self._limits.host_pages else None

    def _make_adapters(self) -> AdapterSlots | None:
        return AdapterSlots(self._config, self._limits, self._mesh, self._dtype) if self._limits.max_adapters else None

    def _programs(self) -> list[tuple[Bucket, RunnerLimits]]:
        """Every step that is compiled: its shape, and limits that say whether it has adapters."""
        kinds = [self._plain_limits, self._limits] if self._limits.max_adapters else [self._plain_limits]
        return [(bucket, limits) for limits in kinds for bucket in self._buckets]

    def _dispatch(self, bucket: Bucket, limits: RunnerLimits, packed: np.ndarray) -> StepOutput:
        uploaded = jax.device_put(packed, self._everywhere)
        step, params = self._steps[bucket, limits.max_adapters], self._params_of(bucket, limits)
        if limits.max_adapters:
            assert self._adapters is not None
            self._state, output = step(params, self._state, uploaded, self._adapters.params)
        else:
            self._state, output = step(params, self._state, uploaded)
        return output

    def _is_stacked(self, bucket: Bucket, limits: RunnerLimits) -> bool:
        return self.layer_memory is not None and not limits.max_adapters and has_stacked_step(bucket)

    def _params_of(self, bucket: Bucket, limits: RunnerLimits) -> Any:
        return self._stacked_params if self._is_stacked(bucket, limits) else self._params

    def _compile_constrained(self, num_rows: int) -> ConstrainedSampling:
        width = 2 + 2 * num_top_logprobs(self._config)
        return ConstrainedSampling(self._draw_impl, self._abstract_state.slots, num_rows, width, self._limits, self._mesh)

    def _compile(self, bucket: Bucket, limits: RunnerLimits) -> Any:
        step = make_step(
            self._config,
            limits,
            bucket,
            self.attention_impl,
            self._choose,
            attention_options=self._attention_options,
            experts_impl=self._experts_impl,
        )
        return self._compile_step(step, bucket, limits)

    def _compile_step(self, step: Callable[..., Any], bucket: Bucket, limits: RunnerLimits) -> Any:
        return self._lower(step, bucket, limits).compile(compiler_options=step_options(bucket, self._product_dtype))

    def _lower(self, step: Callable[..., Any], bucket: Bucket, limits: RunnerLimits) -> Any:
        params = lay_out(self.abstract_params, self._experts_impl)
        params = stacked_abstract(params) if self._is_stacked(bucket, limits) else params
        adapters = abstract_adapters(self._config, limits, self._mesh, self._dtype)
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, (params, self._abstract_state, adapters))
        jitted = jit_step(step, self._mesh, *specs)
        upload = abstract_upload(bucket, limits, self._everywhere)
        arguments = (params, self._abstract_state, upload)
        return jitted.lower(*arguments) if adapters is None else jitted.lower(*arguments, adapters)

    def _empty_state(self, kv_scales: jax.Array | None) -> DeviceState:
        how = self._config, self._limits, self._mesh, self._kv_dtype, self.attention_impl
        make = partial(initial_state, *how, shared_pools=self._shares_pools)
        state = jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, self._abstract_state))()
        return state if kv_scales is None else dataclasses.replace(state, kv_scales=kv_scales)

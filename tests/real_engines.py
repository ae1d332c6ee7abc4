"""Whole engines on real runners, and a way to run requests through them and keep everything that comes out.

One warm runner serves many engines: a scheduler may have smaller limits than its runner, so that a test of another pool,
budget or chunk size compiles nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from checkpoints.checkpoint import open_checkpoint
from jaxserve.config import EngineConfig
from jaxserve.device import runner as runner_module
from jaxserve.device.buckets import Bucket
from jaxserve.device.build import build_runner
from jaxserve.device.kv_scales import measure_scales
from jaxserve.device.runner import DeviceRunner, Weights
from jaxserve.engine.core import EngineCore, EngineStats
from jaxserve.host.jump import NO_JUMPS, JumpForward
from jaxserve.host.prefix import PrefixTree
from jaxserve.host.scheduler import Scheduler
from jaxserve.host.tier import HostTier
from jaxserve.model_config import ModelConfig
from jaxserve.models.families import FAMILIES, model_config_from_hf
from jaxserve.models.params import ParamSpec, map_specs, random_params
from jaxserve.models.quant import quantize_tree
from jaxserve.models.sharding import make_mesh
from jaxserve.plan import Runner, RunnerLimits, StepHandle, StepPlan
from jaxserve.request import FinishReason, Request, SamplingParams, TokenLogprobs
from jaxserve.weights import load_params
from tests.paged_model import UNOPTIMISED

TINY_MODEL = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=72,
    intermediate_size=48,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=8,
    max_position=4096,
    tie_embeddings=True,
)
"""Heads, MLP and vocabulary that two or four devices do not divide."""


def _spread(spec: ParamSpec) -> ParamSpec:
    """Random values that keep activations near 1 and logits apart, so that near-ties are rare."""
    fan_in = math.prod(spec.shape[1:]) if spec.axes[0] == "embed" else spec.shape[-1]
    return dataclasses.replace(spec, scale=1.5 / math.sqrt(fan_in)) if spec.scale else spec


def tiny_runner(
    engine: EngineConfig, model: ModelConfig = TINY_MODEL, *, seed: int = 0, buckets: tuple[Bucket, ...] = ()
) -> DeviceRunner:
    """A warm runner of `model` with random weights, the same ones whatever `engine` says.

    Args:
        buckets: those that are compiled, where not all matter.
    """
    mesh = make_mesh(engine.tensor_parallel, engine.expert_parallel)
    dtype = np.dtype(jnp.dtype(engine.dtype))
    specs = map_specs(_spread, FAMILIES[model.family].specs(model))
    runner = build_runner(engine, model, mesh, dtype)
    params = quantize_tree(specs, random_params(specs, mesh, dtype, seed), mesh, runner.weight_form)
    runner._buckets = buckets or runner._buckets
    runner.warm_up(lambda: Weights(params, _kv_scales(engine, model, params, mesh, dtype)))
    return runner


@contextmanager
def unoptimised() -> Iterator[None]:
    """Runners that are made meanwhile have steps that compile in half the time, and run slower."""
    with patch.object(runner_module, "step_options", lambda bucket, dtype: dict(UNOPTIMISED)):
        yield


def _kv_scales(engine: EngineConfig, model: ModelConfig, params: Any, mesh: Mesh, dtype: np.dtype) -> jax.Array | None:
    kv_dtypes = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
    if engine.kv_dtype not in kv_dtypes:
        return None
    return measure_scales(model, params, mesh, dtype, np.dtype(kv_dtypes[engine.kv_dtype]))


def checkpoint_runner(path: Path, engine: EngineConfig, buckets: tuple[Bucket, ...]) -> DeviceRunner:
    """A warm runner of the checkpoint at `path`, with only `buckets` compiled: a large model takes seconds for each."""
    mesh = make_mesh(engine.tensor_parallel, engine.expert_parallel)
    dtype = np.dtype(jnp.dtype(engine.dtype))
    with open_checkpoint(path) as checkpoint:
        model = model_config_from_hf(checkpoint.config)
        runner = build_runner(engine, model, mesh, dtype)
        params = load_params(checkpoint, model, mesh, dtype, None, runner.weight_form)
    runner._buckets = buckets
    runner.warm_up(lambda: Weights(params))
    return runner


def mixed_requests(
    text: np.ndarray, *, max_prompt: int = 300, min_output: int = 1, max_output: int = 40, longest: int = 0, seed: int = 0
) -> list[Request]:
    """32 greedy requests: pieces of `text` of 1 to `max_prompt` tokens, the first of them of `longest` if given."""
    rng = np.random.default_rng(seed)
    lengths = [longest or max_prompt, 1, *rng.integers(1, max_prompt + 1, 30)]
    requests = []
    for index, length in enumerate(lengths):
        start = rng.integers(0, len(text) - length + 1)
        prompt = tuple(text[start : start + length].tolist())
        params = SamplingParams(temperature=0.0, max_tokens=int(rng.integers(min_output, max_output + 1)), logprobs=2)
        requests.append(Request(request_id=str(index), prompt=prompt, params=params))
    return requests


class PlanLog:
    """A runner that notes the token counts of the rows that pass through it, a list for each step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.steps: list[list[int]] = []

    @property
    def limits(self) -> RunnerLimits:
        return self._runner.limits

    @property
    def largest(self) -> int:
        """Tokens of the largest chunk."""
        return max(count for step in self.steps for count in step)

    def submit(self, plan: StepPlan) -> StepHandle:
        self.steps.append([row.count for row in plan.rows])
        return self._runner.submit(plan)


@dataclasses.dataclass(slots=True)
class Output:
    """All that came of one request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    hidden: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What came of each request, by id, and the engine's counters at the end."""

    outputs: dict[str, Output]
    stats: EngineStats


def run(
    runner: Runner,
    requests: Iterable[Request],
    *,
    prefill_chunk: int = 64,
    overlap: bool = True,
    eos_token_ids: tuple[int, ...] = (),
    prefixes: bool = False,
    tier: HostTier | None = None,
    jump: JumpForward = NO_JUMPS,
    **limits: Any,
) -> Run:
    """Run `requests`, all added at once, through a fresh engine on `runner` until none is left.

    Args:
        limits: changes to the runner's `RunnerLimits`, none of them upwards.
    """
    scheduler = Scheduler(
        dataclasses.replace(runner.limits, **limits),
        prefill_chunk=prefill_chunk,
        eos_token_ids=eos_token_ids,
        seed=0,
        prefixes=PrefixTree(runner.limits.page_size) if prefixes else None,
        tier=tier,
        jump=jump,
    )
    core = EngineCore(scheduler, runner, overlap=overlap)
    outputs: dict[str, Output] = {}
    for request in requests:
        core.add(request)
        outputs[request.request_id] = Output()
    while core.has_work:
        for event in core.step():
            output = outputs[event.request_id]
            assert output.finish_reason is None, "an event after the last"
            output.tokens += event.tokens
            output.logprobs += event.logprobs
            output.finish_reason = event.finish_reason
            output.num_cached = event.num_cached
            assert not event.prompt_logprobs or len(output.tokens) == len(event.tokens), "the first event has them"
            output.prompt_logprobs += event.prompt_logprobs
            output.hidden += event.hidden
    scheduler.check_integrity()
    assert core.last_error is None
    assert scheduler.num_free_pages == scheduler._limits.num_pages
    return Run(outputs, core.stats())


def run_alone(runner: Runner, requests: Iterable[Request], **options: Any) -> dict[str, Output]:
    """What comes of each request when it has the engine to itself."""
    return {request.request_id: run(runner, [request], **options).outputs[request.request_id] for request in requests}

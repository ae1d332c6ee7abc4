"""What a model is and where it fits, from its headers alone: no weights are read and no device is started.

Owns the figures. How they are printed is `inspect_report`'s business; what a model may be and its errors are those of serving.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from checkpoints.checkpoint import Checkpoint, CheckpointBase, CheckpointError, TokenizerFiles, open_checkpoint
from checkpoints.hf_files import GENERATION, read_config, read_tokenizer
from checkpoints.sources import HUB_PREFIX, describe_from_hub
from checkpoints.text_part import text_part
from jaxserve.config import EngineConfig
from jaxserve.device.abstract import page_bytes
from jaxserve.device.build import choose_weight_form, kv_dtype_of, weight_bytes
from jaxserve.errors import ModelLoadError
from jaxserve.model_config import ModelConfig
from jaxserve.models.families import FAMILIES, model_config_from_hf
from jaxserve.models.params import ParamSpec, map_specs
from jaxserve.models.sharding import DEVICES, check_splits
from jaxserve.sampling_defaults import sampling_defaults
from jaxserve.weights import check_params, open_model
from pallas_kernels.aot import TARGETS
from pallas_kernels.paged_attention.choose import Shape, choose

GIB = 2**30
DEFAULTS = EngineConfig()
PAGE_SIZE = DEFAULTS.page_size
USABLE = 0.9
"""Of a device's memory: the rest is for programs, activations and what the platform keeps."""
FIRST_CONTEXT = 2048
MAX_DEVICES = 64
FEW = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A kind of device.

    Attributes:
        memory: bytes of one JAX device; of the CPU, which is one machine however many devices it plays, of all together.
    """

    name: str
    platform: str
    device_kind: str
    memory: int


CHIPS: dict[str, Chip] = {
    target.name: Chip(name=target.name, platform=target.platform, device_kind=target.device_kind, memory=target.hbm_bytes)
    for target in TARGETS.values()
} | {
    "h100": Chip(name="h100", platform="cuda", device_kind="NVIDIA H100 80GB HBM3", memory=80 * GIB),
    "a100": Chip(name="a100", platform="cuda", device_kind="NVIDIA A100-SXM4-80GB", memory=80 * GIB),
}


def this_computer() -> Chip:
    """The CPU, whose memory is the machine's."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Chip(name="cpu", platform="cpu", device_kind="cpu", memory=memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A model.

    Attributes:
        form: of its files.
        parameters, active_parameters: all, and those that one token meets, which are fewer in a mixture of experts.
        stored_bytes: on disk, by type; None where only the config was looked at.
        tokenizer: its kind in words; None for none.
        chat_template: whether there is one.
        sampling: how requests are sampled that do not say.
    """

    model: str
    path: str
    form: str
    architecture: str
    config: ModelConfig
    parameters: int
    active_parameters: int
    stored_bytes: Mapping[str, int] | None
    tokenizer: str | None
    chat_template: bool
    sampling: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model on some devices of a kind.

    Attributes:
        devices: all of them.
        expert_parallel: rows of them, each with its own part of the experts.
        weight_bytes: of each device.
        kv_bytes_per_token: over all devices, in all layers, in the layout that the engine has there.
        kv_bytes: for KV, over all devices; 0 where the weights alone do not fit.
        sequences: how many fit at once, by tokens of context.
    """

    chip: str
    devices: int
    expert_parallel: int
    dtype: str
    weight_dtype: str
    kv_dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    sequences: Mapping[int, int]

    @property
    def holds_weights(self) -> bool:
        """Whether there is any room beside the weights."""
        return self.kv_bytes > 0


def inspect(model: str) -> Inspection:
    """Look at a model's headers.

    Args:
        model: as for `serve`. Of `hf:ORG/NAME` only the small files are fetched.

    Raises:
        ModelLoadError, ConfigError: as `serve` would.
    """
    try:
        with _open(model) as checkpoint:
            config = model_config_from_hf(checkpoint.config, where=str(checkpoint.path))
            if checkpoint.tensors:
                check_params(checkpoint, config, abstract_mesh(1), np.dtype(np.float32))
            return _inspect(model, checkpoint, config)
    except CheckpointError as error:
        raise ModelLoadError(str(error)) from error


def _open(model: str) -> Checkpoint:
    if not model.startswith(HUB_PREFIX):
        return open_model(model)
    path = describe_from_hub(model.removeprefix(HUB_PREFIX))
    if any(path.glob("*.safetensors")):
        return text_part(open_checkpoint(path))
    return ConfigAlone(path)


class ConfigAlone(CheckpointBase):
    """The small files of a repository whose weights are elsewhere."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, read_config(path), read_tokenizer(path), {})

    def read(self, name: str) -> np.ndarray:
        """There is nothing to read."""
        self.info(name)
        raise AssertionError("a checkpoint without tensors had one")


def _inspect(model: str, checkpoint: Checkpoint, config: ModelConfig) -> Inspection:
    specs = list(_specs(config))
    files = checkpoint.tokenizer
    names = checkpoint.config.get("architectures") or [checkpoint.config.get("model_type")]
    return Inspection(
        model=model,
        path=str(checkpoint.path),
        form=_form(checkpoint),
        architecture=str(names[0] if isinstance(names, list) else names),
        config=config,
        parameters=sum(math.prod(spec.shape) for spec in specs),
        active_parameters=sum(_active(spec, config) for spec in specs),
        stored_bytes=dict(checkpoint.stored_bytes()) if checkpoint.tensors else None,
        tokenizer=None if files is None else _tokenizer_kind(files),
        chat_template=files is not None and files.chat_template is not None,
        sampling=sampling_defaults(checkpoint.config.get(GENERATION) or {}, where=str(checkpoint.path)),
    )


def _form(checkpoint: Checkpoint) -> str:
    if not checkpoint.tensors:
        return "config alone"
    if checkpoint.path.is_file():
        return "GGUF"
    return "safetensors" if any(checkpoint.path.glob("*.safetensors")) else "Orbax"


def _tokenizer_kind(files: TokenizerFiles) -> str | None:
    if files.tokenizer_json is None:
        return "SentencePiece" if files.sentencepiece is not None else None
    try:
        model = json.loads(files.tokenizer_json).get("model") or {}
        return f"{model.get('type', 'BPE')}, {len(model.get('vocab') or ()):,} tokens"
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"tokenizer.json: not a usable tokenizer: {error}") from error


def _specs(config: ModelConfig) -> Iterator[ParamSpec]:
    found: list[ParamSpec] = []
    map_specs(found.append, FAMILIES[config.family].specs(config))
    yield from found


def _active(spec: ParamSpec, config: ModelConfig) -> int:
    """Parameters that one token meets: of stacked experts, those that it is sent to."""
    experts = config.experts
    count = math.prod(spec.shape)
    if experts is None or spec.axes[:1] != ("experts",) or len(spec.shape) < 3:
        return count
    return count // experts.num * experts.per_token


def abstract_mesh(tensor_parallel: int, expert_parallel: int = 1) -> AbstractMesh:
    """A mesh of devices that need not be here, as `make_mesh` makes it."""
    return AbstractMesh((expert_parallel, tensor_parallel), DEVICES)


def contexts_of(config: ModelConfig) -> tuple[int, ...]:
    """Lengths of context worth a look: in steps of four, and the longest."""
    lengths = []
    length = FIRST_CONTEXT
    while length < config.max_position:
        lengths.append(length)
        length *= 4
    return (*lengths, config.max_position)


def fit(
    config: ModelConfig,
    chip: Chip,
    tensor_parallel: int,
    expert_parallel: int = 1,
    *,
    engine: EngineConfig = DEFAULTS,
) -> Fit:
    """How a model fits on `tensor_parallel` times `expert_parallel` devices of a kind, by what the engine would place there.

    Args:
        tensor_parallel, expert_parallel: as `EngineConfig` has them.
        engine: whose data types count.

    Raises:
        ConfigError: experts are split, and the model has none; or its matrices cannot be kept so.
    """
    check_splits(config, expert_parallel)
    num_devices = tensor_parallel * expert_parallel
    by_default = "float32" if chip.platform == "cpu" else "bfloat16"
    floats = np.dtype(jnp.dtype(by_default if engine.dtype == "auto" else engine.dtype))
    kv_in = kv_dtype_of(engine, floats)
    mesh = abstract_mesh(tensor_parallel, expert_parallel)
    form = choose_weight_form(engine, config, chip.platform, chip.device_kind, floats)
    of_weights = weight_bytes(config, mesh, floats, form)
    impl = _attention(config, chip, num_devices, floats, kv_in)
    of_page = page_bytes(config, PAGE_SIZE, mesh, kv_in, impl)
    num_memories = 1 if chip.platform == "cpu" else num_devices
    kv_bytes = max(0, int(chip.memory * USABLE) * num_memories - of_weights * num_devices)
    pages = kv_bytes // of_page
    return Fit(
        chip=chip.name,
        devices=num_devices,
        expert_parallel=expert_parallel,
        dtype=floats.name,
        weight_dtype=floats.name if form is None else engine.weight_dtype,
        kv_dtype="fp8" if kv_in.itemsize == 1 and kv_in != np.int8 else kv_in.name,
        weight_bytes=of_weights,
        kv_bytes_per_token=of_page // PAGE_SIZE,
        kv_bytes=kv_bytes,
        sequences={context: pages * config.num_layers // layer_pages(config, context) for context in contexts_of(config)},
    )


def fits(
    config: ModelConfig,
    chips: Sequence[str],
    chip: str | None,
    tensor_parallel: int | None,
    expert_parallel: int = 1,
    *,
    engine: EngineConfig = DEFAULTS,
) -> list[Fit]:
    """Where a model fits: on some numbers of `chip`, else on the fewest of each of `chips`; or with `tensor_parallel` on them.

    Raises:
        ConfigError: as `fit`.
    """
    on = partial(fit, config, engine=engine)
    named = {name: CHIPS[name] if name in CHIPS else this_computer() for name in chips}
    if chip is not None:
        few = (1,) if chip == "cpu" else FEW
        numbers = few if tensor_parallel is None else (tensor_parallel,)
        return [on(named[chip], number, expert_parallel) for number in numbers]
    if tensor_parallel is not None:
        return [on(each, tensor_parallel, expert_parallel) for each in named.values()]
    return [smallest_fit(config, each, expert_parallel, engine=engine) for each in named.values()]


def smallest_fit(config: ModelConfig, chip: Chip, expert_parallel: int = 1, *, engine: EngineConfig = DEFAULTS) -> Fit:
    """The fit on the fewest devices, `expert_parallel` times a power of two, that hold the weights and a short sequence."""
    tensor_parallel = 1
    while True:
        found = fit(config, chip, tensor_parallel, expert_parallel, engine=engine)
        if found.sequences[contexts_of(config)[0]]:
            return found
        if 2 * found.devices > MAX_DEVICES or chip.platform == "cpu":
            return found
        tensor_parallel *= 2


def layer_pages(config: ModelConfig, context: int) -> int:
    """Pages that a sequence of so many tokens holds in all layers together: of those with a window the newest."""
    num_pages = -(-context // PAGE_SIZE)
    windows = [config.layer_window(layer) for layer in range(config.num_layers)]
    return sum(num_pages if window is None else min(num_pages, (window - 2) // PAGE_SIZE + 2) for window in windows)


def _attention(config: ModelConfig, chip: Chip, num_devices: int, dtype: np.dtype, kv_dtype: np.dtype) -> str:
    """The implementation that the engine would choose, since pools are as it wants them."""
    num_kv_heads = -(-config.num_kv_heads // num_devices)
    shape = Shape(
        num_heads=num_kv_heads * (config.num_heads // config.num_kv_heads),
        num_kv_heads=num_kv_heads,
        head_dim=config.head_dim,
        page_size=PAGE_SIZE,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    return choose(chip.platform, chip.device_kind, shape)[0]

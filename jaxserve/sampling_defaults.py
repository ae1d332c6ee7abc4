"""What sampling fields are that a request leaves out: as the model's makers have them in its generation config.

Under the roof with `launch`, since it sees checkpoints and configuration. Owns which keys are heeded, and what is done with
the rest. Does not know requests: `server.call` fills in what this finds, and whatever a request says wins.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.checkpoint import CheckpointError
from checkpoints.hf_files import GENERATION, read_generation
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.request import SamplingParams

logger = logging.getLogger(__name__)

MODELS_OWN, NONE = "auto", "none"

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
"""Nothing but sampling reads these, so they say nothing where the file says `do_sample = false`."""

HEEDED = (*SAMPLING, "repetition_penalty")

UNUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "length_penalty", "guidance_scale"), (None, 1)),
    **dict.fromkeys(("num_beams", "num_beam_groups"), (None, 1)),
    **dict.fromkeys(("no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "min_new_tokens"), (None, 0)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "stop_strings"), (None, [])),
    **dict.fromkeys(("max_new_tokens", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "top_h"), (None,)),
    **dict.fromkeys(("general.sampling.mirostat", "general.sampling.xtc_probability"), (None, 0)),
}
"""Keys that would change outputs elsewhere and do not here, each with the values at which they change nothing."""


def find_defaults(config: Mapping[str, Any], setting: str, *, where: str) -> dict[str, float]:
    """Fields of `SamplingParams` for requests that leave them out, and a line in the log that says which.

    Args:
        config: of the checkpoint.
        setting: `EngineConfig.generation_config`.
        where: the checkpoint, for messages.

    Raises:
        ConfigError: a file that cannot be read, or a value that no request could have.
    """
    if setting == NONE:
        return {}
    if setting == MODELS_OWN:
        generation = config.get(GENERATION) or {}
    else:
        generation, where = _read(Path(setting)), setting
    defaults = sampling_defaults(generation, where=where)
    if defaults:
        said = ", ".join(f"{name} {value}" for name, value in defaults.items())
        logger.info("sampling where a request does not say: %s, by the generation config of %s", said, where)
    if unused := sorted(key for key, neutral in UNUSED.items() if generation.get(key) not in neutral):
        logger.info("the generation config of %s also has %s, not used here", where, ", ".join(unused))
    return defaults


def sampling_defaults(generation: Mapping[str, Any], *, where: str) -> dict[str, float]:
    """What a generation config, as `generation_config.json` has it, says of the fields that are heeded.

    Raises:
        ConfigError: a value is none that a request could have.
    """
    names = [name for name in HEEDED if name not in SAMPLING or generation.get("do_sample") is not False]
    defaults = {name: generation[name] for name in names if generation.get(name) is not None}
    try:
        for name, value in defaults.items():
            if type(value) not in (int, float) or (name == "top_k" and value != int(value)):
                raise InvalidRequest(f"{name} must be a number, found {value!r:.80}", param=name)
        defaults = {name: int(value) if name == "top_k" else float(value) for name, value in defaults.items()}
        SamplingParams(**defaults)
    except (InvalidRequest, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{where}: generation config: {error}; serve with --generation-config none, or with the path of one that is right"
        ) from None
    return defaults


def _read(path: Path) -> Mapping[str, Any]:
    """A file like `generation_config.json`, or the one in a folder."""
    try:
        return read_generation(path)
    except CheckpointError as error:
        raise ConfigError(f"--generation-config: {error}") from None

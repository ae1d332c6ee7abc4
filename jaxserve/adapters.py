"""LoRA adapters from PEFT directories into a runner: an `engine.adapters.AdapterSource`.

Under the roof with `launch`, since it sees checkpoints and models. Owns no format and no mathematics.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints.checkpoint import CheckpointError
from checkpoints.peft import read_peft
from jaxserve.device.runner import DeviceRunner
from jaxserve.errors import ModelLoadError
from jaxserve.model_config import ModelConfig
from jaxserve.models.adapters import arrange
from jaxserve.models.families import FAMILIES


class PeftSource:
    """Reads adapters for one model and installs them in its runner."""

    def __init__(self, config: ModelConfig, runner: DeviceRunner) -> None:
        self._config = config
        self._runner = runner

    def read(self, path: str) -> Any:
        """See `AdapterSource`."""
        family = FAMILIES[self._config.family]
        try:
            adapter = read_peft(Path(path))
        except CheckpointError as error:
            raise ModelLoadError(str(error)) from error
        layers, rank = family.specs(self._config).layers, self._runner.limits.max_adapter_rank
        return self._runner.place_adapter(arrange(adapter.pairs, self._config, layers, family.names, rank, path))

    def install(self, slot: int, weights: Any) -> None:
        """See `AdapterSource`."""
        self._runner.install_adapter(slot, weights)

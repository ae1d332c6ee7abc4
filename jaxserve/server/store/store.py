"""All that a server keeps: its folder, the files and the batches in it."""

from __future__ import annotations

from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.server.store.batches import BatchStore
from jaxserve.server.store.files import FileStore
from jaxserve.server.store.folder import StateFolder


class Store:
    """What was kept in `root`, which is held until `close`.

    Raises:
        ConfigError: another server holds it, or it cannot be made, read or written.
    """

    def __init__(self, root: Path) -> None:
        self._folder = StateFolder(root)
        try:
            self.files = FileStore(self._folder.files)
            self.batches = BatchStore(self._folder.batches)
        except OSError as error:
            self._folder.close()
            raise ConfigError(f"--state-dir {root}: {error}; put that right, or name another folder") from None

    def close(self) -> None:
        """Let another server have the folder. Safe to call again."""
        self._folder.close()

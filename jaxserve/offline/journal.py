"""The files of an offline run: its journal while it goes on, and the output.

Owns where these are and how one becomes the other. `OUTPUT.partial` is the journal; at the end its results are put into the
order of the input in `OUTPUT.tmp`, which then becomes `OUTPUT` in one rename. So `OUTPUT` is whole or absent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.disk import write_whole
from jaxserve.errors import ConfigError, OutputError
from jaxserve.journal import ForeignJournal, Journal, open_journal_file


def journal_path(output: Path) -> Path:
    """Where the journal of a run with this output is."""
    return output.with_name(output.name + ".partial")


def open_journal(output: Path, fingerprint: Mapping[str, Any], num_lines: int) -> Journal:
    """The journal of a run, which may have begun earlier; as `Journal`.

    Raises:
        ConfigError: it belongs to another run, or one that goes on; says what to do.
        OutputError: it cannot be written.
    """
    try:
        return Journal(journal_path(output), fingerprint, num_lines)
    except ForeignJournal as error:
        raise ConfigError(
            f"{error}. Give what it was given to carry on, --restart to begin again, or another --output"
        ) from None


def finish(journal: Journal, output: Path) -> None:
    """Make the output of a journal that is whole, in the order of the input, and remove the journal.

    Raises:
        OutputError: when it cannot be written; the journal is kept.
    """
    try:
        write_whole(output, (result for _, _, result in journal.results()))
        journal.remove()
    except OSError as error:
        raise OutputError(
            f"{output}: {error.strerror}; the {journal.num_done} results are kept in {journal.path}. "
            "Put that right (free some space?)"
        ) from None


def discard(output: Path) -> None:
    """Remove the journal of an unfinished run with this output, if there is one.

    Raises:
        ConfigError: when another run holds it.
    """
    path = journal_path(output)
    if path.exists():
        fd = open_journal_file(path)
        os.unlink(path)
        os.close(fd)


def output_of_run(output: Path, first_id: str | None, num_results: int) -> tuple[int, int] | None:
    """How many results a whole output holds and how many of them failed; None if it is not the output of this run.

    Args:
        first_id: the id of the first result; ids are derived from the run. None if the run has no results.
    """
    count = failed = 0
    with output.open("rb") as file:
        for raw in file:
            try:
                result = json.loads(raw)
            except ValueError:
                return None
            if not isinstance(result, dict) or (count == 0 and result.get("id") != first_id):
                return None
            count += 1
            failed += has_failed(result)
    return (count, failed) if count == num_results else None


def has_failed(result: Mapping[str, Any]) -> bool:
    """Whether a result is an error, in either output format."""
    response = result.get("response") or {}
    return result.get("error") is not None or response.get("status_code", 200) != 200

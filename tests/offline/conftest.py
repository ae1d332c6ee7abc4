"""What tests of offline runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.offline.runs import Runs


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)

"""Marks for test modules that compile much: `pytestmark = CACHED`."""

from __future__ import annotations

import pytest

CACHED = [
    pytest.mark.usefixtures("compile_cache"),
    # Neither a program that cannot be kept, nor a file that a killed run left half written, is a matter of the test's.
    pytest.mark.filterwarnings("ignore:Error (writing|reading) persistent compilation cache entry"),
]

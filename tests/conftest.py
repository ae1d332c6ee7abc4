"""What every test shares: the devices, Hypothesis profiles, shape checks, and where data and the demo model come from.

Everything at the top happens before any test module imports JAX.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Deadlines measure the machine, not the code; a compile makes any example slow.
settings.register_profile("ci", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", parent=settings.get_profile("ci"), max_examples=20)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Data beside the checkout that is too large or not ours to commit; tests that need it skip without it."""
    path = Path(os.environ.get("JAXSERVE_SHARED", ROOT.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"no shared data at {path}; set JAXSERVE_SHARED to its folder")
    return path

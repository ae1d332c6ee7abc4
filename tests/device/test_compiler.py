"""Which products oneDNN gets: those of decodes where it is faster, and which no cache can keep."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device import compiler
from jaxserve.device.buckets import Bucket
from jaxserve.device.compiler import ONEDNN_DECODES, _has_onednn, step_options, uses_onednn


@pytest.mark.parametrize("num_single", ONEDNN_DECODES)
@pytest.mark.parametrize("summed", [4, 8])
def test_onednn_computes_float32_products_of_some_decodes(num_single: int, summed: int, monkeypatch) -> None:
    """Where sums do not take them."""
    monkeypatch.setattr(compiler, "most_columns", lambda: summed)
    bucket = Bucket(num_tokens=num_single, chunk_rows=0, num_single=num_single)
    expected = _has_onednn() and num_single > summed
    assert uses_onednn(bucket, np.dtype("float32")) == expected
    assert step_options(bucket, np.dtype("float32")).get("xla_cpu_use_onednn", False) == expected


@pytest.mark.parametrize("num_single", ONEDNN_DECODES)
def test_it_computes_none_of_bfloat16(num_single: int) -> None:
    bucket = Bucket(num_tokens=num_single, chunk_rows=0, num_single=num_single)
    assert not uses_onednn(bucket, np.dtype(jnp.bfloat16))
    assert "xla_cpu_use_onednn" not in step_options(bucket, np.dtype(jnp.bfloat16))


@pytest.mark.parametrize("bucket", [Bucket(1, 0, 1), Bucket(4, 0, 4), Bucket(128, 8, 32)])
def test_nor_of_other_steps(bucket: Bucket) -> None:
    assert not uses_onednn(bucket, np.dtype("float32"))

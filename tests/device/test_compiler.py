"""Which products oneDNN gets: those of decodes where it is faster, and which no cache can keep."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.buckets import Bucket
from jaxserve.device.compiler import ONEDNN_DECODES, _has_onednn, step_options, uses_onednn


def test_onednn_computes_float32_products_of_many_decodes() -> None:
    bucket = Bucket(num_tokens=ONEDNN_DECODES, chunk_rows=0, num_single=ONEDNN_DECODES)
    assert uses_onednn(bucket, np.dtype("float32")) == _has_onednn()
    assert step_options(bucket, np.dtype("float32")).get("xla_cpu_use_onednn", False) == _has_onednn()


def test_it_computes_none_of_bfloat16() -> None:
    bucket = Bucket(num_tokens=ONEDNN_DECODES, chunk_rows=0, num_single=ONEDNN_DECODES)
    assert not uses_onednn(bucket, np.dtype(jnp.bfloat16))
    assert "xla_cpu_use_onednn" not in step_options(bucket, np.dtype(jnp.bfloat16))


@pytest.mark.parametrize("bucket", [Bucket(1, 0, 1), Bucket(8, 0, 8), Bucket(32, 2, 32)])
def test_nor_of_other_steps(bucket: Bucket) -> None:
    assert not uses_onednn(bucket, np.dtype("float32"))

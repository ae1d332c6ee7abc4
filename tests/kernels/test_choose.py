"""Which implementation a platform gets, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from pallas_kernels.paged_attention.choose import Shape, choose
from pallas_kernels.quant_matmul.choose import choose as choose_quant_matmul
from pallas_kernels.quant_matmul.choose import options_for

SHAPE = Shape(num_heads=32, num_kv_heads=8, head_dim=128, page_size=64, dtype="bfloat16", kv_dtype="bfloat16")


@pytest.mark.parametrize(
    ("platform", "kind", "impl", "word"),
    [
        ("cpu", "cpu", "cpu", "CPU"),
        ("tpu", "TPU v5 lite", "tpu", "TPU v5 lite"),
        # Until it has run on one.
        ("gpu", "NVIDIA H200", "xla", "not yet run"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "xla", "Hopper"),
        ("gpu", "NVIDIA B200", "xla", "Hopper"),
        ("rocm", "MI300", "xla", "rocm"),
    ],
)
def test_by_platform(platform: str, kind: str, impl: str, word: str) -> None:
    chosen, reason = choose(platform, kind, SHAPE)
    assert chosen == impl
    assert word in reason


@pytest.mark.parametrize(
    ("asked", "platform", "kind"),
    [
        ("xla", "tpu", "TPU v6 lite"),
        ("xla", "cpu", "cpu"),
        ("cpu", "cpu", "cpu"),
        ("reference", "cpu", "cpu"),
        ("gpu", "gpu", "NVIDIA H200"),
        ("gpu", "cuda", "NVIDIA H100 80GB HBM3"),
        ("gpu", "gpu", "NVIDIA GH200 480GB"),
        ("tpu", "tpu", "TPU v5p"),
    ],
)
def test_what_is_asked_for_is_taken(asked: str, platform: str, kind: str) -> None:
    assert choose(platform, kind, SHAPE, asked) == (asked, "it was asked for")


@pytest.mark.parametrize(
    ("asked", "platform", "kind", "change", "what"),
    [
        ("gpu", "cpu", "cpu", {}, "does not run on platform cpu"),
        ("cpu", "tpu", "TPU v5 lite", {}, "does not run on platform tpu"),
        ("cpu", "cpu", "cpu", {"head_dim": 10}, "head dim 10"),
        ("cpu", "cpu", "cpu", {"num_kv_heads": 1, "num_heads": 71}, "71 query heads"),
        ("cpu", "cpu", "cpu", {"page_size": 4096}, "4096 positions"),
        ("cpu", "cpu", "cpu", {"kv_dtype": "float16"}, "pages in float16"),
        ("tpu", "gpu", "NVIDIA H200", {}, "does not run on platform gpu"),
        ("gpu", "gpu", "NVIDIA A100-SXM4-80GB", {}, "A100"),
        ("gpu", "gpu", "NVIDIA H200", {"dtype": "float32", "kv_dtype": "float32"}, "bfloat16"),
        ("tpu", "tpu", "TPU v5 lite", {"page_size": 7}, "7"),
        ("tpu", "tpu", "TPU v5 lite", {"kv_dtype": "float32"}, "found float32"),
        ("gpu", "gpu", "NVIDIA H200", {"kv_dtype": "float8_e5m2"}, "found float8_e5m2"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(asked: str, platform: str, kind: str, change: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        choose(platform, kind, dataclasses.replace(SHAPE, **change), asked)  # type: ignore[arg-type]


def test_a_model_that_the_kernel_does_not_take_gets_xla_and_the_reason() -> None:
    for platform, kind in (("tpu", "TPU v5 lite"), ("cpu", "cpu")):
        chosen, reason = choose(platform, kind, dataclasses.replace(SHAPE, page_size=7))
        assert chosen == "xla"
        assert "7" in reason


# --- quant_matmul -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "kind", "dtype", "impl", "word"),
    [
        ("cpu", "cpu", "float32", "xla", "CPU"),
        ("tpu", "TPU v5 lite", "bfloat16", "tpu", "TPU v5 lite"),
        ("gpu", "NVIDIA H200", "bfloat16", "xla", "not yet run"),
        ("gpu", "NVIDIA H200", "float32", "xla", "bfloat16"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "bfloat16", "xla", "Hopper"),
        ("rocm", "MI300", "bfloat16", "xla", "rocm"),
    ],
)
def test_products_by_platform(platform: str, kind: str, dtype: str, impl: str, word: str) -> None:
    chosen, reason = choose_quant_matmul(platform, kind, dtype)
    assert chosen == impl
    assert word in reason


def test_products_that_are_asked_for_are_taken_or_refused() -> None:
    assert choose_quant_matmul("gpu", "NVIDIA H200", "bfloat16", "gpu") == ("gpu", "it was asked for")
    for platform, kind, dtype, asked, what in (
        ("cpu", "cpu", "float32", "tpu", "does not run on platform cpu"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "bfloat16", "gpu", "A100"),
        ("gpu", "NVIDIA H200", "float32", "gpu", "these are float32"),
    ):
        with pytest.raises(ValueError, match=what):
            choose_quant_matmul(platform, kind, dtype, asked)


def test_off_a_cpu_xla_multiplies_the_whole_matrix_in_floats() -> None:
    assert options_for("xla", "cpu") == options_for("tpu", "tpu") == {}
    assert options_for("xla", "gpu")["digits"] == 0

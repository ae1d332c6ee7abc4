"""The device benchmarks' own sections, as far as a CPU lets them: tiny shapes in the interpreter, where times mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.device import products
from pallas_kernels.quant_matmul import gpu
from pallas_kernels.quant_matmul.weights import form_of


@pytest.mark.slow
def test_products_agree_and_are_timed(tmp_path: Path) -> None:
    rows = products.products(True, tmp_path)
    assert all(row["ok"] for row in rows), rows
    names = [row["case"] for row in rows]
    assert any(name.startswith("w8_int8_") for name in names)
    assert any(name.startswith("sample ") for name in names)
    (timed,) = (row for row in rows if "us" in row)
    assert timed["us"] > 0


def test_hardware_cases_have_every_width_and_form() -> None:
    """So that what the engine may choose is all checked where there is a GPU."""
    cases = products.hardware_cases()
    for form in products.FORMS:
        of_form = [case for case in cases if all(getattr(case, key) == value for key, value in form.items())]
        assert {case.num_tokens for case in of_form} >= set(gpu.TOKENS)
    assert {(case.bits, case.group) for case in cases} >= {(bits, group) for bits in (4, 8) for group in (32, 64, 128)}


@pytest.mark.slow
def test_a_wrong_product_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    case = products.hardware_cases()[0]
    right = gpu.quant_matmul
    monkeypatch.setattr(products.gpu, "quant_matmul", lambda *args, **options: right(*args, **options) * 1.1)
    row = products._agreement(case)
    assert not row["ok"]
    assert row["error"] > 0.05
    monkeypatch.setattr(products.gpu, "lay_out", lambda weights: form_of(weights).missing)
    assert "AttributeError" in products._agreement(case)["failure"]

"""`jaxserve inspect`: its figures are the engine's own, its errors those of serving, and no device is started for it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from checkpoints.convert import convert
from jaxserve.__main__ import DEVICES, main
from jaxserve.config import EngineConfig
from jaxserve.device.abstract import page_bytes
from jaxserve.device.build import weight_bytes
from jaxserve.inspect_model import CHIPS, fit, fits, inspect, layer_pages, smallest_fit, this_computer
from jaxserve.inspect_report import count, fits_of_chips, size
from jaxserve.models.families import model_config_from_hf
from jaxserve.models.sharding import make_mesh
from tests.checkpoints.builders import CONFIG, TOKENS, llama_shapes, tiny_gguf, tiny_hf
from tests.real_engines import TINY_MODEL

NUM_PARAMETERS = sum(int(np.prod(shape)) for shape in llama_shapes().values())
TIED = CONFIG | {"tie_word_embeddings": True}


def tied_hf(path: Path) -> Path:
    tiny_hf(path)
    (path / "config.json").write_text(json.dumps(TIED))
    return path


OF_EXPERTS = TIED | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
}


@pytest.mark.parametrize(
    ("values", "tensor_parallel", "expert_parallel"),
    [(TIED, 1, 1), (TIED, 2, 1), (TIED, 4, 1), (OF_EXPERTS, 4, 1), (OF_EXPERTS, 1, 4), (OF_EXPERTS, 2, 2)],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_figures_are_what_the_engine_places(values: dict[str, Any], tensor_parallel: int, expert_parallel: int) -> None:
    config = model_config_from_hf(values)
    found = fit(config, this_computer(), tensor_parallel, expert_parallel, engine=EngineConfig(kv_dtype="bfloat16"))
    mesh = make_mesh(tensor_parallel, expert_parallel)
    assert (found.devices, found.expert_parallel) == (mesh.size, expert_parallel)
    assert found.weight_bytes == weight_bytes(config, mesh, np.dtype(np.float32), None)
    assert found.kv_bytes_per_token * 64 == page_bytes(config, 64, mesh, np.dtype(jax.numpy.bfloat16))


def test_eight_bits_hold_twice_as_much_and_a_large_model_does_not_fit() -> None:
    config = model_config_from_hf(TIED)
    plain, small = (fit(config, CHIPS["h100"], 1, engine=EngineConfig(kv_dtype=kv_dtype)) for kv_dtype in ("auto", "fp8"))
    assert plain.kv_dtype == plain.dtype == "bfloat16"
    assert small.sequences[128] in (2 * plain.sequences[128], 2 * plain.sequences[128] + 1)
    huge = model_config_from_hf(TIED | {"hidden_size": 2**17, "intermediate_size": 2**19})
    found = fit(huge, CHIPS["h100"], 1)
    assert not found.holds_weights
    assert set(found.sequences.values()) == {0}


def test_a_sequence_holds_no_more_than_the_widest_window() -> None:
    mistral = TIED | {"architectures": ["MistralForCausalLM"], "sliding_window": 1024, "max_position_embeddings": 32_768}
    assert len(set(fit(model_config_from_hf(mistral), CHIPS["h100"], 1).sequences.values())) == 1


def test_of_experts_a_token_meets_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_of(OF_EXPERTS, tmp_path, monkeypatch)
    found = inspect("hf:org/name")
    of_expert = 3 * 64 * CONFIG["hidden_size"]  # type: ignore[operator]
    assert found.parameters - found.active_parameters == 2 * 4 * of_expert


def test_experts_are_split_on_times_as_many_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub_of(OF_EXPERTS, tmp_path, monkeypatch)
    command = ["inspect", "hf:org/name", "--expert-parallel", "2"]
    assert main([*command, "--device", "v6e", "--tensor-parallel", "2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["fits"]
    assert (row["devices"], row["expert_parallel"]) == (4, 2)
    assert main([*command, "--device", "v6e"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Sequences at once on v6e, the experts in 2 parts, by tokens of context:" in lines
    assert [line.split()[0] for line in lines[-7:-3]] == ["2", "4", "8", "16"]
    found = fits(model_config_from_hf(OF_EXPERTS), ["v6e"], None, None, 2)
    assert found[0].devices == 2
    assert "the fewest devices that hold it, the experts in 2 parts" in fits_of_chips(found)


def test_a_dense_model_has_no_experts_to_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    assert main(["inspect", str(path), "--expert-parallel", "2"]) == 2
    assert "expert_parallel is 2 but the model has no experts" in capsys.readouterr().err


def test_devices_of_a_cpu_share_its_memory() -> None:
    config = model_config_from_hf(TIED)
    one, four = (fit(config, this_computer(), number) for number in (1, 4))
    assert four.kv_bytes <= one.kv_bytes
    assert smallest_fit(model_config_from_hf(TIED | {"hidden_size": 2**17, "head_dim": 64}), this_computer()).devices == 1


@pytest.mark.parametrize("form", ["GGUF", "safetensors", pytest.param("Orbax", marks=pytest.mark.slow)])
def test_every_format_is_looked_at(form: str, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf") if form == "GGUF" else tied_hf(tmp_path / "hf")
    if form == "Orbax":
        convert(path, tmp_path / "orbax", form="orbax")
        path = tmp_path / "orbax"
    found = inspect(str(path))
    assert (found.form, found.parameters, found.active_parameters) == (form, NUM_PARAMETERS, NUM_PARAMETERS)
    assert sum((found.stored_bytes or {}).values()) == 4 * NUM_PARAMETERS
    assert found.tokenizer == (f"BPE, {len(TOKENS)} tokens" if form == "GGUF" else None)
    assert found.chat_template == (form == "GGUF")


def test_it_reads_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    assert main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (
        f"model          {path}",
        "architecture   LlamaForCausalLM, of the family llama",
        "attention      4 heads over 2 KV heads of 64",
        "KV             1 KiB a token in bfloat16",
        "chat template  yes",
    ):
        assert line in lines
    assert [line.split()[0] for line in lines[-11:-3]] == list(DEVICES)


def test_one_device_is_a_table_of_numbers_and_json_has_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    assert main(["inspect", str(path), "--device", "v5e"]) == 0
    assert "Sequences at once on v5e" in capsys.readouterr().out
    options = ["--device", "v6e", "--tensor-parallel", "2", "--kv-dtype", "int8", "--json"]
    assert main(["inspect", str(path), *options]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["parameters"], values["config"]["num_layers"]) == (NUM_PARAMETERS, 2)
    (row,) = values["fits"]
    assert (row["chip"], row["devices"], row["kv_dtype"], list(row["sequences"])) == ("v6e", 2, "int8", ["128"])


def hub_of(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    hub = ModuleType("huggingface_hub")
    hub.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return asked


def test_of_the_hub_only_small_files_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = hub_of(TIED, tmp_path, monkeypatch)
    assert main(["inspect", "hf:org/name"]) == 0
    assert "*.safetensors" not in asked[0]["allow_patterns"]
    assert "config alone   weights were not looked at" in capsys.readouterr().out


def test_it_says_how_requests_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub_of(TIED, tmp_path, monkeypatch)
    assert main(["inspect", "hf:org/name", "--device", "v5e"]) == 0
    assert "sampling       the API's defaults" in capsys.readouterr().out
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    assert main(["inspect", "hf:org/name", "--device", "v5e"]) == 0
    assert "sampling       temperature 0.6, top_k 20" in capsys.readouterr().out
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    assert main(["inspect", "hf:org/name"]) == 2
    assert "temperature must be a number, found 'hot'" in capsys.readouterr().err


def break_nothing_there(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def break_architecture(path: Path) -> None:
    (path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["GPT2LMHeadModel"]}))


def break_shape(path: Path) -> None:
    (path / "config.json").write_text(json.dumps(TIED | {"intermediate_size": 96}))


def break_tensors(path: Path) -> None:
    (path / "config.json").write_text(json.dumps(TIED | {"num_hidden_layers": 3}))


BROKEN = {
    break_nothing_there: "not a checkpoint",
    break_architecture: "unknown architecture 'GPT2LMHeadModel'",
    break_shape: "mis-shaped: model.layers.0.mlp.gate_proj.weight",
    break_tensors: "missing: model.layers.2.input_layernorm.weight",
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
def test_a_broken_model_is_the_error_of_serving_it(
    damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(tied_hf(tmp_path))
    assert main(["inspect", str(tmp_path)]) == 2
    assert BROKEN[damage] in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--tensor-parallel", "0"], ["--expert-parallel", "0"], ["--device", "v9"], ["--dtype", "int4"]]
)
def test_wrong_options_are_named(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["inspect", "m", *option])
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    assert code == 2
    assert option[0] in capsys.readouterr().err


def test_sizes_read_as_people_say_them() -> None:
    assert [size(n) for n in (0, 999, 1000, 1536, 150 * 2**20, 2**50)] == [
        "0 B",
        "999 B",
        "0.977 KiB",
        "1.5 KiB",
        "150 MiB",
        "1024 TiB",
    ]
    assert [count(n) for n in (999, 134_500_000, 8_030_000_000)] == ["999", "134 M", "8.03 B"]


@pytest.mark.slow
def test_no_device_is_started(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    script = (
        "import sys; from jaxserve.__main__ import main; code = main(['inspect', sys.argv[1]]); "
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized(); sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", script, path], check=True, cwd=Path(__file__).parents[1], capture_output=True)


def test_layers_with_a_window_hold_no_more_than_it_sees() -> None:
    config = dataclasses.replace(TINY_MODEL, num_layers=3, max_position=8192, window=512, windowed=(True, False, True))
    assert layer_pages(config, 512) == 3 * 8
    assert layer_pages(config, 8192) == 128 + 2 * 9

"""What a model's generation config says of sampling: which keys are heeded, how it is told, and that requests win over it."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints.checkpoint import open_checkpoint
from checkpoints.convert import convert
from checkpoints.hf_files import GENERATION
from jaxserve.errors import ConfigError
from jaxserve.offline.llm import LLM
from jaxserve.request import SamplingParams
from jaxserve.sampling_defaults import find_defaults, sampling_defaults
from jaxserve.server.anthropic import parse_messages
from jaxserve.server.call import Call
from jaxserve.server.openai import parse_chat, parse_completion
from jaxserve.server.responses import parse_responses
from tests.checkpoints.builders import tiny_gguf, tiny_hf
from tests.engine import tiny_tokenizers as tiny
from tests.offline.runs import Runs, batch
from tests.offline.toy import toy_engine
from tests.server.serving import MODEL, serving

QWEN = {
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.05,
    "transformers_version": "4.51.0",
}
SAID = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}


def has(generation: dict[str, Any]) -> dict[str, float]:
    return sampling_defaults(generation, where="m")


# --- what a file says -------------------------------------------------------------------------------------------------


def test_sampling_is_heeded_and_nothing_else() -> None:
    assert has(QWEN) == SAID
    assert has({"min_p": 0.1, "top_k": 40.0, "max_new_tokens": 9, "seed": 3}) == {"min_p": 0.1, "top_k": 40}
    assert has({}) == has({"temperature": None}) == {}


def test_what_is_not_sampled_by_its_makers_has_no_values_for_sampling() -> None:
    assert has(QWEN | {"do_sample": False}) == {"repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, found 'hot'"),
        ({"temperature": True}, "temperature must be a number, found True"),
        ({"temperature": -1}, "temperature must be from 0 to 100, found -1"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"top_k": 1.5}, r"top_k must be a number, found 1\.5"),
        ({"top_k": float("inf")}, "cannot convert float infinity"),
        ({"top_p": 0}, r"top_p must be above 0 and at most 1"),
        ({"repetition_penalty": [1]}, r"repetition_penalty must be a number, found \[1\]"),
    ],
)
def test_a_value_that_no_request_could_have_is_an_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"m: generation config: {message}.*; serve with --generation-config none, or"):
        has(values)


# --- where it is found ------------------------------------------------------------------------------------------------


def defaults_of(path: Path, setting: str = "auto") -> dict[str, float]:
    with open_checkpoint(path) as checkpoint:
        return find_defaults(checkpoint.config, setting, where=str(path))


def qwen(path: Path) -> Path:
    tiny_hf(path)
    (path / "generation_config.json").write_text(json.dumps(QWEN))
    return path


def test_a_directory_has_a_file_that_conversion_keeps(tmp_path: Path) -> None:
    source = qwen(tmp_path / "hf")
    convert(source, tmp_path / "copy")
    convert(tmp_path / "copy", tmp_path / "orbax", form="orbax")
    for path in (source, tmp_path / "copy", tmp_path / "orbax"):
        assert defaults_of(path) == SAID
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.config["bos_token_id"] == 1
            assert "bos_token_id" not in checkpoint.config[GENERATION]
    assert GENERATION not in json.loads((tmp_path / "copy" / "config.json").read_text())
    kept = json.loads((tmp_path / "copy" / "generation_config.json").read_text())
    assert kept == QWEN | {"eos_token_id": [2, 7, 1]}  # config.json has another


def test_gguf_has_it_in_its_metadata(tmp_path: Path) -> None:
    assert defaults_of(tiny_gguf(tmp_path / "plain.gguf")) == {}

    def add_sampling(writer: Any) -> None:
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.top_p", 0.95)
        writer.add_float32("general.sampling.penalty_repeat", 1.05)
        writer.add_int32("general.sampling.mirostat", 2)
        writer.add_string("general.sampling.sequence", "kp")

    assert defaults_of(tiny_gguf(tmp_path / "m.gguf", None, add_sampling)) == SAID


def test_a_setting_takes_another_file_or_none(tmp_path: Path) -> None:
    path = qwen(tmp_path / "hf")
    assert defaults_of(path, "none") == {}
    other = tmp_path / "other" / "generation_config.json"
    other.parent.mkdir()
    other.write_text('{"temperature": 0.2}')
    assert defaults_of(path, str(other)) == defaults_of(path, str(other.parent)) == {"temperature": 0.2}
    with pytest.raises(ConfigError, match=r"--generation-config: .*nowhere"):
        defaults_of(path, str(tmp_path / "nowhere"))


def test_the_log_says_what_is_used_and_what_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_hf(tmp_path)
    (path / "generation_config.json").write_text(
        json.dumps(QWEN | {"no_repeat_ngram_size": 3, "num_beams": 1, "max_new_tokens": 100})
    )
    with caplog.at_level(logging.INFO, logger="jaxserve.sampling_defaults"):
        defaults_of(path)
    assert [record.message for record in caplog.records] == [
        "sampling where a request does not say: temperature 0.6, top_k 20, top_p 0.95, repetition_penalty 1.05, by the "
        f"generation config of {path}",
        f"the generation config of {path} also has max_new_tokens, no_repeat_ngram_size, not used here",
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="jaxserve.sampling_defaults"):
        defaults_of(path, "none")
    assert not caplog.records


# --- requests ---------------------------------------------------------------------------------------------------------

Parse = Callable[..., Call]
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[Parse, dict[str, Any]] = {
    parse_completion: {"prompt": "hello"},
    parse_chat: HELLO,
    parse_responses: {"input": "hello"},
    parse_messages: HELLO | {"max_tokens": 9},
}


@pytest.mark.parametrize("parse", BODIES, ids=lambda parse: parse.__name__)
def test_a_request_has_them_where_it_does_not_say(parse: Parse) -> None:
    def params(**fields: Any) -> SamplingParams:
        body = json.dumps({"model": "m"} | BODIES[parse] | fields).encode()
        call = parse(body, tiny.byte_level(), model="m", max_context=512, call_id="c", defaults=SAID)
        if parse is parse_responses:
            echoed = call.echo["temperature"], call.echo["top_p"]
            assert echoed == (call.requests[0].params.temperature, call.requests[0].params.top_p)
        return call.requests[0].params

    def of(found: SamplingParams) -> dict[str, float]:
        return {name: getattr(found, name) for name in SAID}

    assert of(params()) == of(params(temperature=None)) == SAID
    assert of(params(temperature=1, top_p=1, top_k=0)) == {**SAID, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert params(temperature=0).greedy


async def test_a_server_has_them_in_every_answer() -> None:
    async with serving(sampling_defaults={"temperature": 0.25}) as server:
        assert (await server.client.responses.create(model=MODEL, input="hello")).temperature == 0.25
        assert (await server.client.responses.create(model=MODEL, input="hello", temperature=0.5)).temperature == 0.5
        assert (await server.client.completions.create(model=MODEL, prompt="hello")).choices
        assert (await server.client.embeddings.create(model=MODEL, input="hello", encoding_format="float")).data


def test_lines_of_a_file_have_them_too(tmp_path: Path) -> None:
    runs = Runs(tmp_path, engine_options={"sampling_defaults": SAID})
    runs.write([{"prompt": "plain"}, batch("a", prompt="x"), batch("b", prompt="x", temperature=0.5)])
    assert runs() == 0
    found = [(request.params.temperature, request.params.top_k) for request in runs.added()]
    # Flags stand between: of a line that is not in batch format nothing but what they leave open.
    assert sorted(found) == [(0.0, 20), (0.5, 20), (0.6, 20)]


def test_prompts_from_python_have_them_unless_they_bring_parameters() -> None:
    engine = toy_engine(sampling_defaults=SAID)
    llm = LLM.from_engine(engine)
    assert llm.default_params == SamplingParams(**SAID)  # type: ignore[arg-type]
    llm.generate("hello")
    llm.generate("hello", dataclasses.replace(llm.default_params, max_tokens=3))
    llm.generate("hello", SamplingParams(max_tokens=3))
    assert [request.params.temperature for request in engine.added] == [0.6, 0.6, 1.0]

"""lm-eval's `local-completions`, unmodified: its log likelihoods are those of the model, computed without a server."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients.servers import KEY, MODEL, PYTHON, ROOT

pytest.importorskip("lm_eval", reason="lm-eval is not installed here")

TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
{fields}
metadata: {{version: 1}}
"""
ROLLING = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list: [{metric: bits_per_byte}]"""
CHOICE = """output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]"""

WRITE_TOKENIZER = """
import json, sys
from pathlib import Path
from checkpoints.checkpoint import open_checkpoint
from checkpoints.hf_files import write_tokenizer
from checkpoints.sources import default_models_dir, resolve

with open_checkpoint(resolve(sys.argv[1], default_models_dir())) as checkpoint:
    write_tokenizer(Path(sys.argv[2]), checkpoint.tokenizer)
    Path(sys.argv[2], "config.json").write_text(json.dumps(dict(checkpoint.config)))
"""

JUDGE = """
import json, sys
import numpy as np
from tokenizers import Tokenizer
from checkpoints.sources import default_models_dir, resolve
from tests.paged_model import PagedModel

tokenizer = Tokenizer.from_file(sys.argv[2])
model = PagedModel.load(resolve(sys.argv[1], default_models_dir()), capacity=1100)
answers = []
for context, continuation in json.load(sys.stdin):
    before = tokenizer.encode(context).ids
    ids = tokenizer.encode(context + continuation).ids
    model.restart()
    logits = model.feed_all(ids, width=64).astype(np.float64)[len(before) - 1 : -1]
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    own = logprobs[np.arange(len(logprobs)), ids[len(before) :]]
    answers.append((float(own.sum()), bool((own == logprobs.max(axis=1)).all())))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the demo model's tokenizer, as `transformers` reads it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    in_project(WRITE_TOKENIZER, MODEL, str(folder))
    return folder


def in_project(script: str, *arguments: str, **options: Any) -> str:
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    command = [PYTHON, "-c", script, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def evaluate(url: str, tokenizer: Path, folder: Path, tasks: dict[str, tuple[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """The samples of each task, with what lm-eval read of the server's answers."""
    for name, (fields, rows) in tasks.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data, fields=fields))
    model = f"model={MODEL},base_url={url}/completions,tokenizer={tokenizer},tokenizer_backend=huggingface"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--include_path", str(folder)]
    command += ["--model_args", f"{model},num_concurrent=4,max_length=1024", "--tasks", ",".join(tasks)]
    command += ["--log_samples", "--output_path", str(folder / "out")]
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {path.name.split("_")[1]: path for path in folder.glob("out/*/samples_*.jsonl")}
    return {name: [json.loads(line) for line in found[name].read_text().splitlines()] for name in tasks}


def test_log_likelihoods_are_the_model_s(url: str, tokenizer: Path, shared: Path, tmp_path: Path) -> None:
    text = (shared / "data/text/wikitext-2_test.txt").read_text()
    pages = [line.strip() for line in text.splitlines() if len(line) > 400][:6]
    contexts = [" ".join(page.split()[:30]) for page in pages]
    client = openai.OpenAI(base_url=url, api_key=KEY)
    likeliest = [
        client.completions.create(model=MODEL, prompt=context, temperature=0, max_tokens=3).choices[0].text
        for context in contexts
    ]
    others = [" ".join(page.split()[30:36]) for page in pages]
    rows = [
        {"context": context, "choices": [one.strip(), other]}
        for context, one, other in zip(contexts, likeliest, others, strict=True)
    ]
    samples = evaluate(url, tokenizer, tmp_path, {"rolling": (ROLLING, [{"page": pages[0]}]), "choice": (CHOICE, rows)})
    asked, answered = [], []
    for sample in samples["choice"]:
        for arguments, (response,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            asked.append((arguments["arg_0"], arguments["arg_1"]))
            answered.append((float(response[0]), str(response[1]) == "True"))
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    asked.append((settings["bos_token"], pages[0]))
    expected = json.loads(in_project(JUDGE, MODEL, str(tokenizer / "tokenizer.json"), input=json.dumps(asked)))
    assert [flag for _, flag in answered] == [flag for _, flag in expected[:-1]]
    assert any(flag for _, flag in answered), "some continuations are what the model would have said"
    for (found, _), (value, _) in zip(answered, expected, strict=False):
        assert found == pytest.approx(value, abs=2e-3)
    (sample,) = samples["rolling"]
    num_bytes = len(pages[0].encode())
    assert sample["bits_per_byte"][0] == pytest.approx(expected[-1][0], abs=1e-2)
    assert -expected[-1][0] / num_bytes / math.log(2) < 2.0

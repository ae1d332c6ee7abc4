"""Makes `chat_templates.json`: what `transformers` renders for `chat_conversations`. Run by hand; README.md says how."""

from __future__ import annotations

import argparse
import datetime as datetime_module
import json
import sys
from pathlib import Path
from typing import Any

import jinja2
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from chat_conversations import BOS, CASES, EOS, NOW, Case, messages_for_transformers, summary, tools_for  # noqa: E402


class _Now(datetime_module.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime_module.datetime:
        return NOW


def render(tokenizer: PreTrainedTokenizerFast, source: str, template: str, name: str, case: Case) -> dict[str, str]:
    """What comes out, or the error."""
    try:
        rendered = tokenizer.apply_chat_template(
            messages_for_transformers(case, template),
            tools=tools_for(name, case, template),
            documents=case.get("documents"),
            chat_template=source,
            add_generation_prompt=case.get("add_generation_prompt", True),
            continue_final_message=case.get("continue_final_message", False),
            tokenize=False,
            **case.get("variables", {}),
        )
    except jinja2.TemplateError as error:
        kind = "refused" if type(error) is jinja2.TemplateError else type(error).__name__
        return {kind: str(error)}
    except Exception as error:
        return {type(error).__name__: str(error).partition("Final message to continue")[0]}
    return {"rendered": summary(rendered)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("templates", type=Path, help="folder of *.jinja")
    parser.add_argument("--output", type=Path, default=HERE / "chat_templates.json")
    args = parser.parse_args()
    chat_template_utils.datetime = _Now
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token=BOS, eos_token=EOS)
    reference = {
        path.stem: {name: render(tokenizer, path.read_text(), path.stem, name, case) for name, case in CASES.items()}
        for path in sorted(args.templates.glob("*.jinja"))
    }
    made_with = {"transformers": transformers.__version__, "jinja2": jinja2.__version__}
    args.output.write_text(json.dumps({"made_with": made_with, "templates": reference}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

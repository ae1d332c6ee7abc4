"""Prompts from the command line: answers on stdout, then one line of figures.

Owns the demo's prompts and the figures. Knows neither files nor flags.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxserve.batch_file import COMPLETIONS_URL, InputLine
from jaxserve.errors import RequestError
from jaxserve.offline.generation import Completion, Engine, Generation
from jaxserve.offline.results import RequestOptions, Translator

DEMO_PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Explain in two sentences why the sky is blue.",
    "List three things to check before a long bicycle ride.",
)


def answer_prompts(engine: Engine, prompts: Sequence[str], options: RequestOptions) -> int:
    """Print each prompt with its answer, in order and as soon as it is there, and the figures; how many failed."""
    translator = Translator(engine, options)
    generation = Generation(engine)
    submitted_at = time.monotonic()
    numbers: dict[str, int] = {}
    texts: dict[int, str] = {}
    num_failed = 0
    for number, prompt in enumerate(prompts, 1):
        try:
            call = translator.parse(InputLine(number, None, COMPLETIONS_URL, {"prompt": prompt}, False))
            (request,) = call.requests
        except RequestError as error:
            texts[number] = f"error: {error}"
            num_failed += 1
            continue
        numbers[request.request_id] = number
        generation.add(request)
    first_token_at = 0.0
    num_shown = _show(prompts, texts, 0)
    while generation.num_live:
        completed = generation.step()
        if generation.num_output and not first_token_at:
            first_token_at = time.monotonic()
        texts |= {numbers[request_id]: _text(completion) for request_id, completion in completed}
        num_shown = _show(prompts, texts, num_shown)
    if generation.num_output:
        print(_figures(generation.num_output, submitted_at, first_token_at))
    generation.close()
    return num_failed


def _text(completion: Completion) -> str:
    return completion.text.strip() + (" [...]" if completion.finish_reason == "length" else "")


def _show(prompts: Sequence[str], texts: dict[int, str], num_shown: int) -> int:
    """Print the answers that are next in order; how many are printed."""
    while num_shown + 1 in texts:
        print(f"> {prompts[num_shown]}\n{texts[num_shown + 1]}\n", flush=True)
        num_shown += 1
    return num_shown


def _figures(num_output: int, submitted_at: float, first_token_at: float) -> str:
    now = time.monotonic()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return (
        f"first token {first_token_at - submitted_at:.2f} s after the prompts, "
        f"{process_seconds() - (now - first_token_at):.1f} s after the start; "
        f"{num_output} output tokens at {num_output / (now - submitted_at):.1f} tokens/s; "
        f"peak memory {peak / 2**30:.2f} GiB"
    )


def process_seconds() -> float:
    """Seconds since the process was started; since this was imported where the system does not tell."""
    try:
        # Field 22 of stat, counted after the name in parentheses, which may hold spaces: the start, in ticks since boot.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED_AT


_IMPORTED_AT = time.monotonic()

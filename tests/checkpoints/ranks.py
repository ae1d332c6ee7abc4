"""A vocabulary as ranks (the form of tiktoken), written as the metadata that a GGUF file of that model would have."""

from __future__ import annotations

import base64
import itertools
from pathlib import Path

from checkpoints.gguf_metadata import GgufMetadata
from jaxserve.engine.vocab import byte_level_characters

Ranks = dict[bytes, int]

CHARACTER_OF = {byte: character for character, byte in byte_level_characters().items()}


def read_ranks(path: Path) -> Ranks:
    """Bytes of each token to its rank, which is its id."""
    pairs = (line.split() for line in path.read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def metadata_of(ranks: Ranks, pre: str) -> GgufMetadata:
    """As GGUF has it: tokens in byte-level characters, and merges in order."""
    tokens = [_spelled(token) for token, _ in sorted(ranks.items(), key=lambda item: item[1])]
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": _merges(ranks)}
    return GgufMetadata(Path("ranks"), {f"tokenizer.ggml.{key}": value for key, value in values.items()})


def _merges(ranks: Ranks) -> list[str]:
    """For each token the two that it is made of: what merging its bytes gives with better ranks than its own alone."""
    merges = []
    for token, rank in ranks.items():
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [(ranks.get(left + right, rank), i) for i, (left, right) in enumerate(itertools.pairwise(parts))]
            best, i = min(pairs)
            if best >= rank:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append((rank, " ".join(map(_spelled, parts))))
    return [merge for _, merge in sorted(merges)]


def _spelled(token: bytes) -> str:
    return "".join(map(CHARACTER_OF.__getitem__, token))

"""Makes `gemma_model.npz`: what `transformers` computes with Gemma 3 270M, read from the same GGUF file. Run by hand.

Of the vocabulary of 262,144 only some logits are kept at each position, besides the best and the logsumexp of all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from load import GEMMA_TEXTS
from make_references import HERE, forward, greedy
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_GREEDY = 48
NUM_SAMPLED_IDS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path, help="the file that configs/models/gemma-3-270m.toml describes")
    parser.add_argument("--output", type=Path, default=HERE)
    args = parser.parse_args()
    how = {"gguf_file": args.gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(args.gguf.parent, **how)
    model = AutoModelForCausalLM.from_pretrained(
        args.gguf.parent, **how, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    config = model.config
    assert (config.sliding_window, config.layer_types.count("full_attention"), config.head_dim) == (512, 3, 256), config
    sampled = np.sort(np.random.default_rng(0).choice(config.vocab_size, NUM_SAMPLED_IDS, replace=False))
    arrays: dict[str, np.ndarray] = {"sampled_ids": sampled.astype(np.int32)}
    for name, files in GEMMA_TEXTS.items():
        text = "".join((HERE / "texts" / f"{file}.txt").read_text(encoding="utf-8") for file in files)
        ids = [config.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
        logits = forward(model, ids)
        tokens, gaps = greedy(model, ids, NUM_GREEDY)
        best = logits.max(dim=-1)
        parts = {
            "input_ids": np.array(ids, np.int32),
            "argmax": best.indices.numpy().astype(np.int32),
            "argmax_logit": best.values.numpy(),
            "logsumexp": logits.logsumexp(dim=-1).numpy(),
            "sampled_logits": logits[:, torch.from_numpy(sampled)].numpy(),
            "greedy_tokens": np.array(tokens, np.int32),
            "greedy_gaps": np.array(gaps, np.float32),
        }
        arrays |= {f"{name}:{part}": value for part, value in parts.items()}
        print(f"{name}: {len(ids)} tokens, smallest greedy gap {min(gaps):.4f}")
        print(f"  continues: {tokenizer.decode(tokens)!r}")
    np.savez_compressed(args.output / "gemma_model.npz", **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

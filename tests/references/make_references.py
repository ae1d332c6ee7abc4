"""Makes the reference values in this folder with PyTorch and `transformers`. Run by hand, never by the tests.

Owns what is recorded and how; `load.py` reads it back and needs numpy alone. See README.md for the command.
"""

# ruff: noqa: RUF001 - look-alike characters are what the tricky strings are for.

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
TEXTS = ("english", "code", "mixed")
NUM_GREEDY_DEMO = 64
NUM_GREEDY_TINY = 16
NUM_TINY_INPUT = 48
NUM_SAMPLED_IDS = 32
MIN_TINY_GAP = 0.02  # a hundred times the tolerance on tiny models' logits, so their greedy tokens have no near-ties

# What each tiny model is there to prove; everything else is `TINY_BASE`.
TINY_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
# With head_dim 16 and theta 10,000 the wavelengths 6.3, 19.9 and 62.8 fall into all three bands of this scaling.
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "mha_untied": {},
    "gqa_tied": {"num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 256},
    "mqa_theta": {"num_key_value_heads": 1, "hidden_size": 40, "head_dim": 10, "rope_theta": 500.0, "num_hidden_layers": 3},
    "nine_heads_tied": {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 72,
        "tie_word_embeddings": True,
        "rope_theta": 100000.0,
    },
    "head_dim_explicit": {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 40, "head_dim": 12},
    "rope_llama3": {"num_key_value_heads": 2, "head_dim": 16, "rope_scaling": LLAMA3_SCALING, "num_hidden_layers": 3},
    # The spelling of transformers 5: theta and scaling in one table.
    "rope_llama3_v5": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_theta": None,
        "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 10000.0, "factor": 4.0},
    },
    "rope_linear": {"rope_scaling": {"type": "linear", "factor": 4.0}, "num_key_value_heads": 2},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2, "head_dim": 12},
    "large_eps": {"rms_norm_eps": 0.05, "num_attention_heads": 8, "num_key_value_heads": 2},
}

TRICKY_STRINGS = (
    "Hello, world!",
    " leading space",
    "trailing space ",
    "   three   spaces   between   ",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\r\n windows \r\n lines",
    "\ttab\t\ttabs\t",
    "spaces before newline   \n  and after",
    "\u00a0no-break\u00a0space and\u2003em space\u3000ideographic",
    "\u200bzero\u200dwidth\ufeffmarks",
    "0",
    "1234567890",
    "3.14159e-10 0xDEADBEEF 1,000,000 2024-02-29T23:59:60Z",
    "½ ² ٣ ७ Ⅷ ①",
    "I'm you're we'll they'd it's DON'T CAN'T I’m",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "def f(x):\n    return x ** 2  # square\n",
    "for(int i=0;i<n;++i){a[i]+=b[i]*c[i];}",
    '<div class="a b">&nbsp;</div>',
    '{"key": [1, 2.5, null, true], "nested": {"a\\"b": "\\u00e9"}}',
    "$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}$",
    "https://example.org/path?query=1&other=%20#fragment",
    "!!!???...---===+++***///\\\\\\|||",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "Pneumonoultramicroscopicsilicovolcanoconiosis",
    "naïve café Ångström Škoda",
    "cafe\u0301 A\u030angstro\u0308m",
    "Die Größe der Übung überraschte Jürgen.",
    "Съешь же ещё этих мягких французских булок",
    "私は昨日、東京で寿司を食べました。",
    "我能吞下玻璃而不伤身体。",
    "나는 유리를 먹을 수 있어요",
    "أنا قادر على أكل الزجاج",
    "אני יכול לאכול זכוכית",
    "मैं काँच खा सकता हूँ",
    "ฉันกินกระจกได้",
    "😀",
    "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇨🇭",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀 𐍈",
    "\x00\x01\x1f\x7f",
    "\u0080\ufffd\uffff",
    "",
)
SPECIAL_STRINGS = (
    "<|im_start|>user\nHi<|im_end|>\n",
    "text<|endoftext|>more",
    "<|im_start|><|im_start|>",
    "< |im_end|> and <|im_end| >",
)
CONVERSATIONS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "What is the capital of Peru?"}]},
    {
        "messages": [
            {"role": "system", "content": "You answer in one short sentence."},
            {"role": "user", "content": "Why is the sky blue?"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "Name a prime number."},
            {"role": "assistant", "content": "17"},
            {"role": "user", "content": "A larger one, please!\n\nAnd explain.  "},
        ]
    },
    {
        "messages": [
            {"role": "system", "content": ""},
            {"role": "user", "content": "Schreib „Grüße“ auf 日本語 👋🏽"},
            {"role": "assistant", "content": "```python\nprint('よろしく')\n```"},
        ],
        "add_generation_prompt": False,
    },
    {"messages": [{"role": "user", "content": ""}]},
    {"messages": [{"role": "user", "content": "  keep {{ braces }} and {% tags %} as they are\n"}]},
)


def forward(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """Logits of one sequence, without a cache: [tokens, vocabulary]."""
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def greedy(model: LlamaForCausalLM, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """`count` greedy tokens after `ids`, end-of-sequence tokens not heeded, and each one's lead over the runner-up.

    Tokens are chosen with a KV cache, and must be the ones that a forward pass over the whole sequence chooses.
    """
    tokens: list[int] = []
    with torch.inference_mode():
        cache = DynamicCache()
        step = model(torch.tensor([ids]), past_key_values=cache)
        while len(tokens) < count:
            tokens.append(int(step.logits[0, -1].argmax()))
            step = model(torch.tensor([tokens[-1:]]), past_key_values=cache)
    logits = forward(model, ids + tokens)[len(ids) - 1 : -1]
    top = logits.topk(2, dim=-1)
    assert top.indices[:, 0].tolist() == tokens, "cached and uncached decoding disagree"
    return tokens, (top.values[:, 0] - top.values[:, 1]).tolist()


def double_error(model: LlamaForCausalLM, ids: list[int]) -> tuple[torch.Tensor, float]:
    """float32 logits, and the largest difference from the same model in float64: how exact the reference itself is."""
    logits = forward(model, ids)
    exact = forward(model.double(), ids)
    model.float()
    return logits, float((logits.double() - exact).abs().max())


def random_tiny(config: dict[str, Any], seed: int) -> tuple[LlamaForCausalLM, list[int]]:
    """A model of random weights, exact in float16 to halve the files, and an input for it."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager")).eval().float()
    for path, parameter in model.named_parameters():
        parameter.data = random_weight(path, parameter).to(torch.float16).float()
    return model, torch.randint(0, config["vocab_size"], (NUM_TINY_INPUT,)).tolist()


def make_tiny(name: str, changes: dict[str, Any], output: Path) -> None:
    """Record one tiny random model, whole: config, weights, input, logits of every position, greedy tokens."""
    config = {key: value for key, value in {**TINY_BASE, **changes}.items() if value is not None or key.endswith("token_id")}
    for seed in range(100):
        model, ids = random_tiny(config, seed)
        tokens, gaps = greedy(model, ids, NUM_GREEDY_TINY)
        if min(gaps) > MIN_TINY_GAP:
            break
    logits, error = double_error(model, ids)
    assert min(gaps) > MIN_TINY_GAP, f"{name}: no seed without near-ties"
    assert error < 2e-5, f"{name}: float32 is off by {error:.2e}"
    assert 0.5 < logits.std() < 4, f"{name}: logits have deviation {logits.std():.2f}"
    np.savez_compressed(
        output / f"tiny_{name}.npz",
        config=np.array(json.dumps(config)),
        input_ids=np.array(ids, np.int32),
        logits=logits.numpy(),
        greedy_tokens=np.array(tokens, np.int32),
        greedy_gaps=np.array(gaps, np.float32),
        **{f"weight:{path}": parameter.detach().numpy().astype(np.float16) for path, parameter in model.named_parameters()},
    )
    print(f"tiny_{name}: logits {logits.std():.2f}, float32 error {error:.1e}, smallest greedy gap {min(gaps):.3f}")


def random_weight(path: str, parameter: torch.Tensor) -> torch.Tensor:
    """Values under which every part of the model moves the logits: no weight is zero, one, or small enough to ignore."""
    noise = torch.randn_like(parameter)
    if path.endswith("norm.weight"):
        return 1 + 0.3 * noise
    if path.endswith("bias"):
        return 0.5 * noise
    return 1.5 * noise / parameter.shape[-1] ** 0.5


def make_demo(source: Path, output: Path) -> None:
    """Record the demo model on the texts, what fits: see `load.DemoReference`."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    sampled = torch.from_numpy(np.random.default_rng(0).choice(model.config.vocab_size, NUM_SAMPLED_IDS, replace=False))
    sampled = sampled.sort().values
    arrays: dict[str, np.ndarray] = {"sampled_ids": sampled.numpy().astype(np.int32)}
    for name in TEXTS:
        ids = tokenizer.encode((HERE / "texts" / f"{name}.txt").read_text(encoding="utf-8"), add_special_tokens=False)
        assert len(ids) >= 200
        logits, error = double_error(model, ids)
        tokens, gaps = greedy(model, ids, NUM_GREEDY_DEMO)
        best = logits.max(dim=-1)
        parts = {
            "input_ids": np.array(ids, np.int32),
            "argmax": best.indices.numpy().astype(np.int32),
            "argmax_logit": best.values.numpy(),
            "logsumexp": logits.logsumexp(dim=-1).numpy(),
            "sampled_logits": logits[:, sampled].numpy(),
            "last_logits": logits[-1].numpy(),
            "greedy_tokens": np.array(tokens, np.int32),
            "greedy_gaps": np.array(gaps, np.float32),
        }
        arrays |= {f"{name}:{part}": value for part, value in parts.items()}
        print(f"{name}: {len(ids)} tokens, float32 error {error:.1e}, smallest greedy gap {min(gaps):.4f}")
        print(f"  continues: {tokenizer.decode(tokens)!r}")
    np.savez_compressed(output / "demo_model.npz", **arrays)  # type: ignore[arg-type]
    write_json(output / "demo_tokenizer.json", tokenizer_reference(tokenizer))


def tokenizer_reference(tokenizer: Any) -> dict[str, Any]:
    """Ids of the strings, and text and ids of the conversations."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    conversations = []
    for conversation in CONVERSATIONS:
        generate = conversation.get("add_generation_prompt", True)
        text = tokenizer.apply_chat_template(conversation["messages"], tokenize=False, add_generation_prompt=generate)
        conversations.append(
            {"messages": conversation["messages"], "add_generation_prompt": generate, "text": text, "ids": encode(text)}
        )
    return {
        "encode": [{"text": text, "ids": encode(text)} for text in TRICKY_STRINGS],
        "encode_special": [{"text": text, "ids": encode(text)} for text in SPECIAL_STRINGS],
        "chat": conversations,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """One entry a line, so that a change reads well in a diff."""
    lists = [
        f"{json.dumps(key)}: [\n" + ",\n".join(json.dumps(entry, ensure_ascii=True) for entry in entries) + "\n]"
        for key, entries in value.items()
    ]
    path.write_text("{\n" + ",\n".join(lists) + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--demo-model", type=Path, help="Hugging Face directory of the demo model; without it, only tiny models"
    )
    parser.add_argument("--output", type=Path, default=HERE, help="where the files go (default: beside this script)")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, "
          f"tokenizers {tokenizers.__version__}, numpy {np.__version__}")  # fmt: skip
    for name, changes in TINY_MODELS.items():
        make_tiny(name, changes, args.output)
    if args.demo_model is not None:
        make_demo(args.demo_model, args.output)


if __name__ == "__main__":
    main()

"""Small tokenizers of the two kinds that language models use, built here, for tests of everything that handles text."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from checkpoints.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, build_bpe_model
from jaxserve.engine.sentencepieces import SentencePieceSource
from jaxserve.engine.text import Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_ID, IM_START_ID, IM_END_ID = range(3)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('only user and assistant roles') }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def byte_level_library() -> Library:
    """Byte-level BPE: three special tokens, the 256 bytes, a few merges, and one added token that is text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("Ġ", "w"),
        ("o", "r"),
        ("Ġw", "or"),
        ("<", "|"),
        ("|", ">"),
    ]
    merges += [("Ġ", "Ġ"), ("i", "n"), ("Ã", "©")]
    tokens = [*SPECIAL, *alphabet, *(left + right for left, right in merges)]
    library = Library(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(SPECIAL)
    library.add_tokens([AddedToken("<think>", normalized=False)])
    return library


def sentencepiece_library() -> Library:
    """Sentencepiece-style BPE as Llama 2 has it: word-boundary marks, byte fallback, one leading space."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzINST[]/.,!é<>"]
    merges = [("▁", "h"), ("e", "l"), ("▁h", "el"), ("▁hel", "l"), ("▁hell", "o"), ("▁", "▁"), ("w", "o"), ("</", "s")]
    merges = [("<", "/"), *merges]
    tokens += [*letters, *(left + right for left, right in merges)]
    library = Library(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def unigram_library() -> Library:
    """Unigram with Metaspace, whose vocabulary lists the special tokens as pieces."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁hello", -3.0)]
    pieces += [(letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyz<>/!"]
    library = Library(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def byte_level(chat_template: str | None = CHATML, *, add_bos: bool = False) -> Tokenizer:
    """A tokenizer as ChatML models have: no BOS if not asked for, `<|im_end|>` ends a turn."""
    return Tokenizer(
        byte_level_library().to_str(),
        chat_template=chat_template,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        add_bos=add_bos,
    )


def sentencepiece(chat_template: str | None = LLAMA2) -> Tokenizer:
    """A tokenizer as Llama 2 has: a `tokenizer.model`, BOS first, a template that emits it."""
    source = SentencePieceSource(model=sentencepiece_model(), keeps_characters=True)
    return Tokenizer(source, chat_template=chat_template, bos_token="<s>", eos_token="</s>", add_bos=True)


def converted_sentencepiece(chat_template: str | None = LLAMA2) -> Tokenizer:
    """The same as a `tokenizer.json`."""
    return Tokenizer(
        sentencepiece_library().to_str(), chat_template=chat_template, bos_token="<s>", eos_token="</s>", add_bos=True
    )


def sentencepiece_model() -> bytes:
    """The vocabulary of `sentencepiece_library` as SentencePiece has it: what it merges first scores best."""
    vocabulary = sentencepiece_library().get_vocab(with_added_tokens=False)
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    kinds += [NORMAL] * (len(pieces) - len(kinds))
    scores = [-float(i) if len(piece) > 1 else -1000.0 for i, piece in enumerate(pieces)]
    return build_bpe_model(pieces, scores, kinds, unknown_id=0, bos_id=1, eos_id=2, dummy_prefix=True)

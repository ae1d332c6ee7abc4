"""Weights on disk, whatever their format, presented as Hugging Face names, layout, config and tokenizer files.

Start at `checkpoint.open_checkpoint`, `tree.load_tree` and `sources.resolve`. Knows files and arrays; knows neither
models nor requests.
"""

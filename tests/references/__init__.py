"""Reference values that `transformers` computed, and `load.py` to read them."""

"""Kernels for CPUs: `emit.py` is the language that they are written in, `foreign.py` makes of them what XLA calls."""

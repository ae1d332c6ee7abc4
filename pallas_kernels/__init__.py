"""Kernels of the serving step, importable alone: one folder per kernel, each with an explicit `impl`.

A kernel's `reference.py` is its definition; every other implementation is tested against it. Knows JAX only: no models, no
engine.
"""

"""The kernel lab: variants of a kernel side by side, checked against the definition, timed or compiled ahead of time.

`python -m bench.kernels --help` says how it runs. `subjects.py` has the kernels and their shapes, `registry.py` how a variant
is added, `measure.py` the clock, `ahead.py` the compilers of devices that are not here, `report.py` what is written.
"""

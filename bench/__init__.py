"""Benchmarks: each runs from the command line and writes a report. Results are artifacts and never go into git."""

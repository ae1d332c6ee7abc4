"""A server in virtual time: the real scheduler, prefix tree, admission and loop, on a runner that only costs time. No JAX."""

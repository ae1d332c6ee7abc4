"""Rungs on which kernels are proven without their hardware: interpretation, export, ahead-of-time compilation."""

"""What only a real GPU can tell: numbers and speed of the GPU kernels, and of the whole step. See `bench/device.sh`."""

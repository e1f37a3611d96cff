"""Tree attention in plain Triton for any GPU: forward and backward kernels with their launchers."""

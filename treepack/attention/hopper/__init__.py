"""Tree attention for Hopper GPUs in Gluon: one file per kernel, and `launch` to run them."""

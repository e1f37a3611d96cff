"""Tree attention for Hopper GPUs, in Gluon: one file per kernel, `launch` runs them."""

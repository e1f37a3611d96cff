"""Triton kernels of recurrent layers on trees: in chunks, along the tree, and of convolutions."""

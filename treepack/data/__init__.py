"""Packed rows as tensors: one row as a batch, the dataset, the order of rows in an epoch, and prefetching."""

"""Packed rows as tensors: batches, the dataset, the order of epochs, prefetching."""

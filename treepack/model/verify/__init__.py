"""Gradients of a model on rows, compared with gradients of every trajectory alone."""

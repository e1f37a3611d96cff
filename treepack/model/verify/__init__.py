"""Gradients of a model on rows, compared with those of every trajectory alone."""

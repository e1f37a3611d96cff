"""Losses over terms, their denominators, and the columns that they need: tensors in, a scalar out, without a model."""

"""Adapters on a model: LoRA, where it is put, and a base in 4 bits."""

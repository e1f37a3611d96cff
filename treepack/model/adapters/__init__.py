"""Adapters on a model: LoRA, the layers that get it, and a base in 4 bits."""

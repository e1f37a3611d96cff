"""Bases of 4 bits for adapters: NF4 with quantised constants (QLoRA, arXiv 2305.14314), by bitsandbytes.

base, dtype of products, device --quantization--> arguments of from_pretrained
base --keeping_scales--> the same base, whose weights of 4 bits may be sharded in the block
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from treepack.errors import TreepackError
from treepack.model.adapters.lora_options import require_packages
from treepack.model.experts.active import ROUNDED


def quantization(source: str | Path, compute_dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a base of 4 bits.

    Raises:
        TreepackError: `source` is a config file, whose random weights transformers does not round, or the products
            would be in float64.
    """
    require_packages(quantize=True)
    if str(source).endswith(".json"):
        raise TreepackError(f"{source}: is a config file; quantize needs the directory of a model with weights")
    if compute_dtype == torch.float64:
        raise TreepackError(f"{source}: a base of 4 bits has no products in float64; use float32")
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )
    return {"quantization_config": settings, "device_map": {"": device}}


@contextmanager
def keeping_scales(model: nn.Module) -> Iterator[None]:
    """Keep the scales of weights of 4 bits, which FSDP replaces in the block by tensors without attributes."""
    modules: list[Any] = list(model.modules())
    found = {module: module._parameters.get("weight") for module in modules}
    states = {module: weight.quant_state for module, weight in found.items() if hasattr(weight, "quant_state")}
    for module, state in states.items():
        module.quant_state = state  # where bitsandbytes looks for the scales of a weight without them
    yield
    for module, state in states.items():
        setattr(module.weight, ROUNDED, math.prod(state.shape))

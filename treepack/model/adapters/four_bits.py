"""Bases of 4 bits for adapters: NF4 with quantised constants (QLoRA, arXiv 2305.14314), by bitsandbytes.

base, dtype of products, device --quantization--> arguments of from_pretrained
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from treepack.errors import TreepackError
from treepack.model.adapters.adapter import require_packages


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

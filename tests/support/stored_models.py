"""Tiny checkpoints whose weights are stored quantised, written as their programs write them.

save_stored(path, "nf4" | "int8" | "fp8" | "mxfp4") --> directory for from_pretrained
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GptOssConfig, Qwen3Config

_SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32}


def save_whole_model(path: Path, *, experts: bool = False) -> Path:
    """Write a model with whole weights, Qwen3 or gpt-oss."""
    config = GptOssConfig(**_SIZES, **_EXPERTS) if experts else Qwen3Config(**_SIZES, tie_word_embeddings=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def save_stored(path: Path, kind: str) -> Path:
    """Write a checkpoint with quantised weights into `path`."""
    if kind in ("nf4", "int8"):
        whole = save_whole_model(path.with_name(f"{path.name}-whole"))
        bits: dict[str, Any] = {"load_in_8bit": True}
        if kind == "nf4":  # a dtype of products that no test asks for
            bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        settings = BitsAndBytesConfig(**bits)
        model = AutoModelForCausalLM.from_pretrained(whole, quantization_config=settings, device_map={"": "cpu"})
        model.save_pretrained(path)
        return path
    save_whole_model(path, experts=kind == "mxfp4")
    tensors = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if kind == "fp8" and name.endswith("proj.weight"):
            scale = weight.abs().amax() / 448
            tensors[name], tensors[f"{name}_scale_inv"] = (weight / scale).to(torch.float8_e4m3fn), scale.view(1, 1)
        elif kind == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            generator = torch.Generator().manual_seed(inputs)
            # [E, out, in / 32, 16] bytes of two numbers, and a scale of 2**(122 - 127) per 32 numbers
            shape = (experts, outputs, inputs // 32)
            tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            tensors[f"{name}_scales"] = torch.full(shape, 122, dtype=torch.uint8)
        else:
            tensors[name] = weight
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    entry: dict[str, Any] = {"quant_method": kind}
    if kind == "fp8":
        entry |= {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    set_quantization(path, entry)
    return path


def set_quantization(model: Path, entry: dict[str, Any]) -> None:
    """Write a quantization_config into the config.json of a model."""
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**fields, "quantization_config": entry}))

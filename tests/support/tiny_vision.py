"""Tiny random checkpoints of vision-language models, as transformers writes them and as the hub has them.

"gemma3" --tiny_vision--> model of the type, with one layer in the vision tower
model --save_vision--> directory with the names that transformers writes today, that are in memory, or that the
                       first checkpoints on the hub have
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from support.oracle_model import VOCABULARY

IMAGE_TOKEN = VOCABULARY - 1

_TEXT: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 256},
    **{"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"shared_expert_intermediate_size": 16, "first_k_dense_replace": 1, "sliding_window": 256, "layer_types": None},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
_VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "depth": 1, "embed_dim": 16, "head_dim": 8},
    **{"num_attention_heads": 2, "num_heads": 2, "patch_size": 4, "image_size": 16, "out_hidden_size": 32},
    **{"spatial_merge_size": 2, "num_position_embeddings": 16, "mlp_ratio": 2},
    **{"deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]},
}
# Pairs of rotary dimensions for time, height and width: of 8 dimensions of a head, of which GLM-4V-MoE turns a half.
_SECTIONS = {kind: [2, 1, 1] for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v")}
_SECTIONS["glm4v_moe"] = [1, 1, 0]
# Of Qwen 3.5 a quarter turns.
_SECTIONS["qwen3_5"] = _SECTIONS["qwen3_5_moe"] = [1, 0, 0]
_LAYERS = {kind: ["linear_attention", "full_attention"] for kind in ("qwen3_5", "qwen3_5_moe")}

# From names in memory to those of the first checkpoints on the hub.
_LLAVA = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head", "language_model.lm_head"),
    (r"^model\.(vision_tower|multi_modal_projector)", r"\1"),
)
_QWEN = ((r"^model\.language_model\.", "model."), (r"^model\.visual", "visual"))
HUB_NAMES = {"qwen2_vl": _QWEN, "qwen2_5_vl": _QWEN, "gemma3": _LLAVA, "mistral3": _LLAVA, "internvl": _LLAVA}


def vision_config(kind: str, **fields: Any) -> Any:
    """Return a small configuration of the type `kind`; `fields` are options of its text half."""
    default = AutoConfig.for_model(kind)
    parts = {}
    for name, sizes in (("text_config", _TEXT), ("vision_config", _VISION)):
        options = getattr(default, name).to_dict()
        parts[name] = options | {key: value for key, value in sizes.items() if key in options}
    if kind in _SECTIONS:
        rope = parts["text_config"]["rope_parameters"]
        parts["text_config"]["rope_parameters"] = {**rope, "mrope_section": _SECTIONS[kind]}
    if kind == "qwen2_vl":  # its vision tower calls the width of the text `hidden_size`
        parts["vision_config"]["hidden_size"] = 32
    parts["text_config"] |= {"layer_types": _LAYERS[kind], **fields} if kind in _LAYERS else fields
    config = type(default)(**parts)
    for name, token in {"image_token_id": IMAGE_TOKEN, "video_token_id": VOCABULARY}.items():
        if getattr(config, name, None) is not None:  # image_token_id is another name of image_token_index
            setattr(config, name, token)
    return config


def tiny_vision(kind: str, **fields: Any) -> Any:
    """Return a tiny random model of the type `kind`, float32, in eval mode; equal arguments give equal weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(vision_config(kind, **fields), dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim > 1:  # of order one, so that attention is far from uniform and a wrong mask shows
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model.eval()


def save_vision(model: Any, directory: Path, names: str = "saved") -> Path:
    """Write a checkpoint in two files, its vision half in bf16, with a processor's file; return the directory.

    `names` are "saved" (those of save_pretrained), "memory" (of the model's state), "hub" (of the first checkpoints),
    "tied" (the same, with two tied tensors), or "turned" (the same, with experts as in Qwen3-VL's checkpoints).
    """
    model.save_pretrained(directory)
    state = load_file(directory / "model.safetensors")
    if names != "saved":
        stored = {tensor.data_ptr(): name for name, tensor in reversed(model.state_dict().items())}
        state = {name: model.state_dict()[name].clone() for name in stored.values()}
    if names == "tied":
        state["lm_head.weight"] = model.lm_head.weight.detach().clone()
    if names == "turned":
        state = {name: tensor.mT.contiguous() if "experts" in name else tensor for name, tensor in state.items()}
    if names == "hub":
        for pattern, new in HUB_NAMES[model.config.model_type]:
            state = {re.sub(pattern, new, name): tensor for name, tensor in state.items()}
    state = {name: tensor.bfloat16() if _is_vision(name) else tensor for name, tensor in state.items()}
    (directory / "model.safetensors").unlink()
    files = {name: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, name in enumerate(sorted(state))}
    for file in set(files.values()):
        part = {name: state[name] for name in files if files[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "preprocessor_config.json").write_text('{"size": 16}\n')
    return directory


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return every tensor in the safetensors files of a directory."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _is_vision(name: str) -> bool:
    return "vis" in name or "multi_modal" in name

"""vLLM's own code reads an adapter of experts, and splits it into the factors of each expert that were trained."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.oracle_model import tiny_config
from support.vllm_servers import PYTHON
from treepack.model.adapters.adapter import assign, initial_weights, save_adapter
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.load import load_model

pytestmark = pytest.mark.vllm

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Stands in for the parts of vLLM that need a GPU: a wrapped layer, and the manager around it.
PROGRAM = """
import sys, types, torch
from safetensors.torch import save_file
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
folder, out = sys.argv[1:]
helper = PEFTHelper.from_local_dir(folder, max_position_embeddings=None)
expected = {"experts", "q_proj", "k_proj", "v_proj", "o_proj"}
lora = LoRAModel.from_local_checkpoint(folder, expected, helper, lora_model_id=1, device="cpu")
layer = types.SimpleNamespace(
    global_num_experts=4, ep_rank=0, use_ep=False, w13_lora_a_stacked=[torch.empty(1, 4)] * 2,
    base_layer=types.SimpleNamespace(local_num_experts=4), local_num_experts=4, _base_model="",
)
manager = types.SimpleNamespace(
    model=types.SimpleNamespace(config=types.SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])),
    _get_lora_layer_weights=lambda model, name: model.loras.get(name),
)
name = next(each for each in lora.loras if each.endswith("layers.1.mlp.experts"))
LoRAModelManager._convert_3d_to_2d_moe_lora(manager, lora, layer, name)
found = lora.loras[name]
tensors = {f"{part}{i}": each.clone().contiguous()
    for part in "ab" for i, each in enumerate(getattr(found, f"lora_{part}"))}
save_file(tensors | {"scale": torch.tensor(float(found.scaling))}, out)
"""


def test_vllm_reads_the_factors_of_each_expert(tmp_path: Path) -> None:
    source = tiny_config(tmp_path / "moe.json", model_type="qwen3_moe", **EXPERTS)
    loaded = load_model(source, attention="reference", lora=LoraOptions(rank=3, alpha=6.0))
    assign(loaded.model, initial_weights(loaded.model, 1, random_b=True), torch.float32)
    save_adapter(loaded.model, tmp_path / "adapter", None)
    out = tmp_path / "read.safetensors"
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM, str(tmp_path / "adapter"), str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read = load_file(out)
    # vLLM's order is gate, down, up; each [E, r, in] and [E, out, r]
    gate, down, up = (float(read["scale"]) * read[f"b{i}"] @ read[f"a{i}"] for i in range(3))
    down_wrapper = loaded.model.base_model.model.model.layers[1].mlp.experts
    expected = down_wrapper.get_delta_weight("default"), down_wrapper.base_layer.get_delta_weight("default")
    torch.testing.assert_close(down, expected[0])
    torch.testing.assert_close(torch.cat([gate, up], 1), expected[1])

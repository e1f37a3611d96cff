"""The random model of `carry.py` on the device, and the memory that its rows may take."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compilations import made_on

from treepack.costs.model_cost import PRESETS
from treepack.memory.budget import available_memory
from treepack.memory.device_memory import update_bytes
from treepack.memory.offload import LayerOffload
from treepack.model.layers import adapt_layers, adapted_layers
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel

TINY: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
POSITIONS = {"max_position_embeddings": 1 << 20}
STATE_BYTES = {"adamw": 8, "sgd": 0}

# Of the free memory: allocators leave gaps, and the peak of a long piece is extrapolated from short ones.
USABLE = 0.92


@dataclass(frozen=True)
class Bench:
    """The model, and the memory that may be used."""

    loaded: LoadedModel
    optimiser: torch.optim.Optimizer
    options: argparse.Namespace

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.loaded.device

    def free_bytes(self) -> int:
        """Return the bytes that gradients, the optimiser's states and activations may still take."""
        torch.cuda.empty_cache()
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free = self.unreserved_bytes() + unused
        state = 0 if self.optimiser.state else STATE_BYTES[self.options.optimizer]
        return int(USABLE * free) - update_bytes(self.loaded.model, state_bytes=state)

    def unreserved_bytes(self) -> int:
        """Return what torch's allocator may still take from the GPU."""
        free = int(torch.cuda.mem_get_info(self.device)[0])
        if self.options.gpu_gb is None:
            return free
        return max(0, min(free, int(self.options.gpu_gb * 1e9) - torch.cuda.memory_reserved(self.device)))

    def host_bytes(self) -> int:
        """Return what may be pinned."""
        if self.options.host_gb is not None:
            return int(self.options.host_gb * 1e9)
        return int(USABLE * available_memory())


def num_layers(loaded: LoadedModel) -> int:
    """Return the number of layers."""
    adapted = adapted_layers(loaded.causal)
    assert adapted is not None
    return len(adapted.modules)


def set_layers(loaded: LoadedModel, recomputed: int, offload: LayerOffload | None) -> None:
    """Recompute the first layers from now on, with their inputs in host memory or not."""
    adapted = adapted_layers(loaded.causal)
    assert adapted is not None
    adapted.recomputed, adapted.offload = recomputed, offload


def load(options: argparse.Namespace, device: torch.device) -> Bench:
    """Return a random model whose layers are compiled and may be recomputed, with its optimiser."""
    name = options.model
    config = dict(TINY if options.dry_run else PRESETS.get(name) or json.loads(Path(name).read_text(encoding="utf-8")))
    config |= POSITIONS | ({} if options.layers is None else {"num_hidden_layers": options.layers})
    if options.divide > 1:
        for name in ("num_hidden_layers", "vocab_size"):
            config[name] = max(1, round(config[name] / options.divide))
    config.pop("layer_types", None)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "config.json"
        source.write_text(json.dumps(config))
        with made_on(device):
            loaded = load_model(source, attention="auto", dtype=torch.float32, autocast=torch.bfloat16, device=device)
    adapt_layers(loaded.model, checkpointing=True, compiled=device.type == "cuda")
    loaded.model.train()
    parameters, fused = loaded.model.parameters(), device.type == "cuda"
    if options.optimizer == "sgd":
        return Bench(loaded, torch.optim.SGD(parameters, lr=0.0, fused=fused), options)
    return Bench(loaded, torch.optim.AdamW(parameters, lr=0.0, fused=fused), options)

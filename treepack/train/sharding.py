"""A model whose weights, gradients and optimiser are shared out over the ranks of a run (FSDP2).

    source, ranks --load_sharded--> LoadedModel, its `root` a module that gathers weights as they are needed

    root            embeddings, final norm, output layer: gathered for a whole row, forward and backward
      layer 0       each layer's weights are gathered before it runs and dropped after
      layer 1 ...

`root(function)` runs `function` inside the forward of the root module, so that the loss, which reads the output layer
in chunks, finds it whole: `LoadedModel.compute`. Gradients are summed over ranks, never averaged, in float32: each rank
divides its rows by the denominator of the whole step.

Weights are read shard by shard from safetensors: no rank holds the model. Where transformers renames or merges weights
as it loads them, each rank loads the model on the CPU and keeps its shard, and a note says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treepack.attention import IMPLEMENTATIONS
from treepack.errors import TreepackError
from treepack.model.layers import adapt_layers, find_layers
from treepack.model.load import (
    LoadedModel,
    build_model,
    hide_progress_bars,
    read_config,
    translate_load_errors,
    with_attention,
)
from treepack.train.options import TrainOptions

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class _Root(nn.Module):
    """The module that FSDP takes for the whole model; its forward is whatever is computed with the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


def load_sharded(source: str | Path, options: TrainOptions, device: torch.device) -> LoadedModel:
    """Load a causal language model over the ranks of the process group, with its layers as `options` ask.

    Args:
        source: as in `model.load_model`; a config file gives every rank the same random weights, whole, and then its
            shard.
        options: attention, dtype, gather_dtype, cpu_offload, checkpointing, compilation and seed are read.
        device: where this rank computes.

    Raises:
        TreepackError: as `model.load_model`, and for layers that FSDP cannot find.
    """
    config, notes = read_config(source, options.attention)
    files = None if str(source).endswith(".json") else weight_files(source)
    with translate_load_errors(source), hide_progress_bars():
        model = _empty(source, config) if files else build_model(source, config, torch.float32, options.seed)
    readable = files is not None and set(_stored(model)) <= set(files)
    if files is not None and not readable:
        notes = (*notes, "transformers converts these weights as it loads them: every rank read the whole model once")
        with translate_load_errors(source), hide_progress_bars():
            model = build_model(source, config, torch.float32, options.seed)
    model.eval()
    if not readable and not options.cpu_offload:
        model.to(device)
    root = _shard(model, options, device)
    if readable:
        assert files is not None
        _fill(model, files, torch.device("cpu") if options.cpu_offload else device, source)
    for module in model.modules():  # computed with where the rank computes, even if the weights wait on the CPU
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    loaded = LoadedModel(model, str(source), "reference", notes, device=device, root=root)
    loaded = with_attention(loaded, options.attention, torch.bfloat16 if options.dtype == "bf16" else torch.float32)
    # Last, for what a compiler learns from the probe's few tokens does not hold for rows.
    adapt_layers(model, checkpointing=options.gradient_checkpointing, compiled=options.compile)
    root.reshard()  # a forward without a backward leaves the root whole, and an optimiser would take what is whole
    return loaded


def _empty(source: str | Path, config: Any) -> Any:
    """The model without memory for its weights, with the settings of generation that are beside them."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    settings = {"attn_implementation": IMPLEMENTATIONS["reference"], "dtype": torch.float32}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **settings)
    with suppress(OSError):  # there are none
        model.generation_config = GenerationConfig.from_pretrained(str(source))
    return model


def _shard(model: Any, options: TrainOptions, device: torch.device) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    lower = torch.bfloat16 if options.gather_dtype == "bf16" else None
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (torch.distributed.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32, cast_forward_inputs=False),
        "offload_policy": OffloadPolicy(),
    }
    if options.cpu_offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    layers = find_layers(model)
    if not layers:
        raise TreepackError(f"{type(model).__name__} has no layers to share out over ranks; train it in one process")
    for layer in layers:
        fully_shard(layer, **settings)
    root = _Root(model)
    fully_shard(root, **settings)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    return root


def weight_files(source: str | Path) -> dict[str, Path] | None:
    """The safetensors file of every tensor, or None if the weights are stored otherwise."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    def find(name: str) -> Path | None:
        quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}
        with translate_load_errors(source):
            path = cached_file(str(source), name, **quiet)
        return None if path is None else Path(path)

    single = find(_SINGLE)  # first, as transformers does: an index may be left from weights that were there before
    index = find(_INDEX) if single is None else None
    if index is not None:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        paths = {name: find(name) for name in sorted(set(names.values()))}
        missing = [name for name, path in paths.items() if path is None]
        if missing:
            raise TreepackError(f"{source}: {missing[0]} is missing; fetch the whole checkpoint")
        return {name: path for name, file in names.items() if (path := paths[file]) is not None}
    if single is None:
        return None
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)


def _stored(model: Any) -> dict[str, Tensor]:
    """The tensors that a checkpoint of `model` holds: parameters and persistent buffers, tied ones once."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            named[name] = tensor
            seen.add(id(tensor))
    return named


@torch.no_grad()
def _fill(model: Any, files: dict[str, Path], device: torch.device, source: str | Path) -> None:
    """Give the sharded model on the meta device its memory, and this rank's part of the weights."""
    from safetensors import safe_open
    from torch.distributed.tensor import DTensor

    model.to_empty(device=device)
    model.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point():
            local.fill_(torch.nan)  # what is forgotten below must not pass the probe
    stored = _stored(model)
    by_file: dict[Path, list[str]] = {}
    for name in stored:
        by_file.setdefault(files[name], []).append(name)
    for path, names in by_file.items():
        with translate_load_errors(source), safe_open(path, "pt") as file:
            for name in names:
                _read(file.get_slice(name), stored[name], f"{source}: {name}")
    # Buffers that no checkpoint holds, such as rotary frequencies: transformers computes them where weights are there.
    for tensor in stored.values():
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()


def _read(stored: Any, tensor: Tensor, where: str) -> None:
    """Copy this rank's rows of a tensor on disk."""
    from torch.distributed.tensor import DTensor

    if list(stored.get_shape()) != list(tensor.shape):
        raise TreepackError(
            f"{where} is {stored.get_shape()} in its weights and {list(tensor.shape)} by its configuration; expected a "
            "whole checkpoint"
        )
    if not isinstance(tensor, DTensor):
        tensor.copy_(stored[:] if tensor.ndim else stored[...])
        return
    local = tensor.to_local()
    if len(local):  # FSDP cuts dimension 0 into equal parts, the last ones smaller or empty
        first = -(-len(tensor) // tensor.device_mesh.size()) * tensor.device_mesh.get_local_rank()
        local.copy_(stored[first : first + len(local)])


def whole_state(loaded: LoadedModel) -> dict[str, Any]:
    """The model's tensors in full, on the CPU of rank 0; empty on the others. Every rank must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(loaded.model, options=options)
    return state

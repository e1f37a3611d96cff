"""A model whose weights, gradients and optimiser are sharded over the ranks of a run (FSDP2).

    source, ranks --load_sharded--> LoadedModel, its `root` a module that gathers weights when they are needed

    root            final norm, output layer: gathered for a whole row, forward and backward
      embedding     gathered for its lookup only, unless it is the output layer too
      layer 0       the weights of each layer are gathered before it runs and dropped after it
      layer 1 ...

`root(function)` runs `function` inside the forward of the root module (see `LoadedModel.compute`). The loss needs this,
because it reads the output layer in chunks and the layer must be whole. Gradients are summed over ranks in float32 and
never averaged: each rank divides the loss of its rows by the denominator of the whole step. For a step with rows in
pieces, `whole_weights` keeps everything gathered, because ranks then run different numbers of passes.

Each rank reads its shards from safetensors (`model.weights.reading`), so that no rank holds the whole model. If
transformers computes with weights when it loads them, each rank loads the whole model on the CPU and keeps its shard,
and a note is made. A base of 4 bits too is whole on every rank until it is sharded. Every rank has the whole weights of
an adapter on its CPU for a moment, because they are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treepack.errors import TreepackError
from treepack.memory.device_memory import local_part
from treepack.memory.offload import LayerOffload
from treepack.memory.shortage import memory_errors
from treepack.model.adapters.adapter import assign, base_of, is_adapted, put_adapter
from treepack.model.adapters.four_bits import keeping_scales, quantization
from treepack.model.experts.active import stacked_experts
from treepack.model.experts.division import check_share
from treepack.model.experts.over_ranks import share_experts, whole_experts
from treepack.model.head.value_head import value_head_of, without_value_head
from treepack.model.layers import adapt_layers, find_layers
from treepack.model.load import (
    build_empty,
    build_model,
    hide_progress_bars,
    put_value_head,
    read_config,
    translate_load_errors,
    with_attention,
)
from treepack.model.loaded import LoadedModel
from treepack.model.stored_weights import prepare_products, stored_kind
from treepack.model.verify.slope import check_stored_slope
from treepack.model.weights.files import weight_files
from treepack.model.weights.reading import fill, find_plan, own_part
from treepack.model.weights.whole_checkpoint import check_savable, has_rest
from treepack.sequence.share import check_heads, share_rows
from treepack.train.options import TrainOptions

_NO_ROOM_FOR_WHOLE = (
    "while each rank gathered the whole weights for rows in pieces",
    "train with --gather-dtype bf16 or LoRA, or pack with a smaller --capacity and train without --carry",
)


class _Root(nn.Module):
    """The root module for FSDP; its forward calls any function that computes with the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


def load_sharded(source: str | Path, options: TrainOptions, device: torch.device) -> LoadedModel:
    """Load a causal language model, sharded over the ranks of the process group.

    Args:
        source: as in `model.load.load_model`. From a config file every rank makes the same random weights, whole, and
            keeps its shard.
        options: attention, dtype, gather_dtype, compile, seed, sequence_ranks and the options of
            recomputation are used.
        device: the device on which this rank computes.

    Raises:
        TreepackError: as `model.load.load_model`, and if the model has no layers that can be found.
    """
    base, adapter = base_of(source, options.lora)
    rounds = options.lora is not None and options.lora.quantize is not None
    config, notes = read_config(base, options.attention, quantize=rounds, dequantize=options.dequantize)
    stored = stored_kind(config)
    _check_shardable(stored, base, options)
    check_heads(config.get_text_config(), options.ranks_of_row, base)
    if options.ranks_of_experts > 1:
        check_share(stacked_experts(config.get_text_config()), options.ranks_of_experts, base)
    half = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    rounded = quantization(base, half, device) if rounds else {}
    is_rounded = bool(rounded) or (stored is not None and not options.dequantize)
    files = None if is_rounded or stored or base.endswith(".json") else weight_files(base)
    with translate_load_errors(base), hide_progress_bars():
        if files:
            causal = build_empty(base, config, torch.float32)
        else:
            place = {"device": device} if is_rounded else {}
            causal = build_model(
                base, config, torch.float32, options.seed, dequantize=options.dequantize, **place, **rounded
            )
            prepare_products(causal, half)
        plan = find_plan(causal, files, base) if files else None
    if plan is not None and has_rest(causal, base):
        check_savable(causal, base)
    if files is not None and plan is None:
        notes = (*notes, "transformers converts these weights when it loads them: every rank read the whole model once")
        with translate_load_errors(base), hide_progress_bars():
            causal = build_model(base, config, torch.float32, options.seed)
    model, weights, more = put_adapter(causal, adapter, options.lora, source=str(source), seed=options.seed)
    if options.objective.has_values:
        weights |= put_value_head(model, (str(source), base))
    model.eval()
    if plan is not None:
        model.to("meta")  # the parameters of the adapter too
    else:
        assign(model, weights, torch.float32)
        if not is_rounded:  # these weights are on the device
            model.to(device)
    if is_rounded:
        check_stored_slope(LoadedModel(model, str(source), "reference", (), device=device), half, seed=options.seed)
    with keeping_scales(causal):
        root = _shard(model, causal, options, device)
    if plan is not None:
        assert files is not None
        fill(causal, plan, files, device, base)
        _copy_parts(weights, model)
    _move_buffers(model, device)
    loaded = LoadedModel(model, str(source), "reference", (*notes, *more), device=device, root=root)
    loaded = with_attention(loaded, options.attention, half)
    # After the probe in `with_attention`: compiled for its few tokens, the layers would be compiled again for rows.
    adapt(causal, options, device)
    # The probe is a forward without a backward, which leaves the root gathered. An optimiser made now would take the
    # gathered parameters in place of the shards.
    root.reshard()
    if options.ranks_of_row > 1:  # neighbours, so that they are on one machine
        share_rows(causal, torch.distributed.new_subgroups(options.ranks_of_row)[0])  # type: ignore[no-untyped-call]
    return loaded


def _check_shardable(stored: str | None, base: str, options: TrainOptions) -> None:
    """Refuse stored weights whose scales FSDP2 would lose, or whose dtype it does not gather."""
    if stored not in (None, "bitsandbytes, 4 bits") and not options.dequantize:
        raise TreepackError(
            f"{base}: its weights are quantised ({stored}), which ranks cannot share; give the checkpoint in bf16 of "
            "the same model, add --dequantize if it is fp8 or mxfp4, or train in one process"
        )


def adapt(causal: Any, options: TrainOptions, device: torch.device) -> None:
    """Compile, recompute and offload the layers of a model according to the options; "auto" does nothing yet.

    The layers of a model that can recompute them are prepared in any case, so that their number may change later.

    Raises:
        TreepackError: as `layers.adapt_layers`.
    """
    count, offload = options.checkpoint_layers, options.offload_checkpoints is True
    if count == "auto":
        count = "all" if offload else 0
    able = bool(find_layers(causal)) and causal.supports_gradient_checkpointing
    adapt_layers(
        causal,
        checkpointing=able or count != 0,
        compiled=options.compile is True,
        recomputed=count if isinstance(count, int) else None,
        offload=LayerOffload(device) if offload else None,
    )


def _shard(model: Any, causal: Any, options: TrainOptions, device: torch.device) -> Any:
    """Shard each layer of `causal`, and the rest of `model`, which contains it, as the root; return the root module.

    Raises:
        TreepackError: the layers are not found.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = _expert_mesh(device, options)
    lower = torch.bfloat16 if options.gather_dtype == "bf16" else None
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32, cast_forward_inputs=False),
    }
    if options.ranks_of_experts > 1:
        settings["ignored_params"] = share_experts(causal, mesh, str(causal.config.name_or_path))
    layers = find_layers(causal)
    if not layers:
        raise TreepackError(f"{type(causal).__name__} has no layers to shard over ranks; train it in one process")
    for layer in layers:
        fully_shard(layer, **settings)
    words, output = causal.get_input_embeddings(), causal.get_output_embeddings()
    if output is None or words.weight is not output.weight:
        fully_shard(words, **settings)
        words.set_unshard_in_backward(False)  # a lookup needs no weights there
    head = value_head_of(causal)
    if head is not None:  # gathered in float32 whatever `gather_dtype` is
        fully_shard(head, **{**settings, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)})
    root = _Root(model)
    fully_shard(root, **settings)
    for module in _sharded_modules(root):
        module.set_gradient_divide_factor(1.0)  # FSDP's default divides by the number of ranks
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    return root


def _expert_mesh(device: torch.device, options: TrainOptions) -> Any:
    """Return the mesh of FSDP2, along whose last dimension experts are divided too.

    8 ranks with 8 expert ranks: one dimension of 8. With 4: (replica 2, expert 4), and weights are whole on every 4
    ranks, because all parameters of one optimiser must have one mesh.
    """
    from torch.distributed.device_mesh import init_device_mesh

    size, expert = torch.distributed.get_world_size(), options.ranks_of_experts
    if expert in (1, size):
        return init_device_mesh(device.type, (size,))
    return init_device_mesh(device.type, (size // expert, expert), mesh_dim_names=("replica", "expert"))


@contextmanager
def whole_weights(loaded: LoadedModel) -> Iterator[None]:
    """Keep the whole weights on every rank during the block, whose passes then wait for no other rank.

    Ranks may run different numbers of forward and backward passes in the block. Each rank adds up its gradients,
    until the last backward pass of the block runs inside `summing_gradients` on all ranks. Needs memory for the whole
    weights, and for their gradients if there is a backward pass. Every rank must enter and leave the block. Nothing
    happens for a model that is not sharded.

    Raises:
        TreepackError: the whole weights do not fit.
    """
    root = loaded.root
    if root is None:
        yield
        return
    modules = _sharded_modules(root)
    with memory_errors(*_NO_ROOM_FOR_WHOLE):
        for module in modules:
            module.unshard()
    _keep_whole(root, True)
    try:
        with whole_experts(loaded.causal):
            yield
    except TreepackError:
        loaded.model.zero_grad(set_to_none=True)  # of the whole weights, which no optimiser has
        raise
    finally:
        _keep_whole(root, False)
        for module in modules:
            module.reshard()


def whole_bytes(loaded: LoadedModel) -> int:
    """Return the bytes of all parameters of a model, of which this rank may have a part only."""
    return sum(each.numel() * each.element_size() for each in loaded.model.parameters())


@contextmanager
def summing_gradients(loaded: LoadedModel) -> Iterator[None]:
    """Sum all gradients of the block `whole_weights` over the ranks, in one backward pass that every rank runs here."""
    if loaded.root is not None:
        loaded.root.set_requires_gradient_sync(True)
    yield


def can_repeat(loaded: LoadedModel) -> bool:
    """Return True if `forget_passes` can follow a pass that failed; a sharded model needs torch 2.13 for it."""
    return loaded.root is None or hasattr(loaded.root, "reset_iter_state")


def forget_passes(loaded: LoadedModel) -> None:
    """Forget a pass that failed inside `whole_weights`, so that the next one can start; all ranks must call this."""
    if loaded.root is not None:
        loaded.root.reset_iter_state()
        for module in _sharded_modules(loaded.root):  # a module whose pass failed may have kept its whole weights
            module.reshard()


def _sharded_modules(root: Any) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _keep_whole(root: Any, whole: bool) -> None:
    """Keep weights and gradients whole from pass to pass, or gather and drop them in each pass, as after loading."""
    root.set_requires_gradient_sync(not whole)
    root.set_reshard_after_backward(not whole)
    root.set_reshard_after_forward(not whole)
    # FSDP keeps the weights of the root, which the end of the forward needs first, until the backward pass.
    root.set_reshard_after_forward(False, recurse=False)


@torch.no_grad()
def _copy_parts(whole: Mapping[str, Tensor], model: nn.Module) -> None:
    """Copy this rank's parts of the tensors `whole` into the parameters of their names."""
    for name, parameter in model.named_parameters():
        if name in whole:
            ranges = own_part(parameter)
            local_part(parameter).copy_(whole[name][tuple(slice(first, stop) for first, stop in ranges)])


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():  # FSDP moves only parameters
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def whole_state(loaded: LoadedModel) -> dict[str, Any]:
    """Return the whole tensors of the model on the CPU of rank 0, and {} on the other ranks; all ranks must call it.

    Of a model with an adapter, only the trained weights; never the value head (`value_head.whole_value_head`).
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=is_adapted(loaded.model))
    with without_value_head(loaded.causal):
        state: dict[str, Any] = get_model_state_dict(loaded.model, options=options)
    return state

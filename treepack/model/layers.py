"""Compile the layers of a transformers model, or recompute them in the backward pass, or both.

Neither changes the results of training, except for rounding: compilation saves time, recomputation saves memory and
costs time.

    layer 0 1 2 3 4 5     recomputed = 4: layers 0 to 3 keep their input and run again in the backward pass
          R R R R . .     layers 4 and 5 keep all their activations

The last layers keep their activations, because the backward pass frees these first: when the first layer is recomputed,
which takes the memory of one layer more, they are gone.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from treepack.attention import TreePass
from treepack.attention.operator import keep_attention
from treepack.errors import TreepackError
from treepack.memory.offload import LayerOffload
from treepack.recurrent.entry import is_recurrent

_log = logging.getLogger("treepack")

# Attributes of a model: its `AdaptedLayers`, True if it is compiled, and the forwards of its layers before that.
_LAYERS = "_treepack_layers"
_COMPILED = "_treepack_compiled"
_PLAIN = "_treepack_plain"
_CHECKPOINTS = "torch._higher_order_ops.wrap"  # the logger of torch


@dataclass
class AdaptedLayers:
    """The layers of a model, of which the first `recomputed` run again in the backward pass.

    With `offload`, their inputs and attention outputs wait in host memory until then. `are_graphs` becomes False when
    the compiler meets a layer with attention that is not one graph, for example because of experts.
    """

    modules: tuple[nn.Module, ...]
    recomputed: int
    offload: LayerOffload | None = None
    are_graphs: bool = True


def adapt_layers(
    model: Any,
    *,
    checkpointing: bool,
    compiled: bool,
    recomputed: int | None = None,
    offload: LayerOffload | None = None,
) -> None:
    """Compile the layers, or recompute them in the backward pass, or both, or neither; the last call counts.

    Args:
        model: a model of transformers; it is changed in place.
        checkpointing: recompute layers.
        compiled: compile layers, see `compile_layers`.
        recomputed: with `checkpointing`, the number of layers to recompute, the first ones; None for all.
        offload: with `checkpointing`, where inputs and attention outputs wait; None for the device of the model.

    Raises:
        TreepackError: if the model's layers cannot be compiled or checkpointed, or it has fewer than `recomputed`.
    """
    layers = tuple(find_layers(model))
    plain = vars(model).setdefault(_PLAIN, [layer.forward for layer in layers])
    for layer, forward in zip(layers, plain, strict=True):
        layer.forward = forward
    setattr(model, _COMPILED, False)
    if compiled:
        compile_layers(model)
    if not checkpointing:
        return
    if not layers and recomputed is None and offload is None:
        checkpoint_layers(model)
        return
    if not layers:
        raise TreepackError(
            f"{type(model).__name__} has no layers to choose from; omit --checkpoint-layers and --offload-checkpoints"
        )
    if not compiled:
        _check_checkpointing(model)
    adapted = AdaptedLayers(layers, len(layers), offload)
    setattr(model, _LAYERS, adapted)
    if recomputed is not None:
        set_recomputed(model, recomputed)
    for number, (layer, forward) in enumerate(zip(layers, plain, strict=True)):
        # Around the compiled function: a graph break inside a checkpoint region, which is where transformers' own
        # checkpointing would put it, leaves the whole region uncompiled. Only a layer that is one graph may have the
        # checkpoint in it, so the compiler refuses another one. A recurrence breaks it, and has no attention to keep.
        whole = compiled and not is_recurrent(layer)
        inside = torch.compile(_recomputed_forward(forward), dynamic=True, fullgraph=True) if whole else None
        layer.forward = adapted_forward(layer, number, adapted, inside)


def compile_layers(model: Any) -> None:
    """Compile every layer with torch.compile, once for rows of all lengths.

    Attention by the project's own kernels is an operator in the graph; any other breaks the graph and runs uncompiled.
    Matrix products keep their precision; the order of sums, and so their rounding, may change.

    Raises:
        TreepackError: if transformers marks no layers in this model.
    """
    layers = find_layers(model)
    if not layers:
        raise TreepackError(f"{type(model).__name__} has no layers to compile; train without --compile")
    # Otherwise the epsilon of a norm is a tensor on the CPU, and the compiler makes C++ code for it, in a minute.
    torch._dynamo.config.specialize_float = True
    # Otherwise the sizes at which fused norms pay are guards, and each of them compiles the layers again for long rows.
    torch._inductor.config.triton.mix_order_reduction_non_strict_mode = True
    # Otherwise the first layer under an adapter gets an input without a gradient, and is another graph than the others.
    if not model.get_input_embeddings().weight.requires_grad and not hasattr(model, "_require_grads_hook"):
        model.enable_input_require_grads()
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    setattr(model, _COMPILED, True)


def has_compiled_layers(model: Any) -> bool:
    """Return True if `compile_layers` has compiled the layers of a model."""
    return bool(getattr(model, _COMPILED, False))


def checkpoint_layers(model: Any) -> None:
    """Recompute each layer in the backward pass instead of keeping its activations, by the code of transformers.

    Raises:
        TreepackError: if the model does not support checkpointing.
    """
    _check_checkpointing(model)
    # transformers renamed the method within version 5.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _check_checkpointing(model: Any) -> None:
    if not model.supports_gradient_checkpointing:
        raise TreepackError(f"{type(model).__name__} has no gradient checkpointing; train without it")


def _is_of_use(record: logging.LogRecord) -> bool:
    # torch warns that operations in place would be wrong in a compiled checkpoint; layers have none.
    return "context_fn is passed" not in record.getMessage()


def _recomputed_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that is computed again in the backward pass, except for its attention; to be compiled."""
    logging.getLogger(_CHECKPOINTS).addFilter(_is_of_use)

    def recomputed(*arguments: Any, **options: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=keep_attention, **options)

    return recomputed


def adapted_forward(
    layer: nn.Module, number: int, adapted: AdaptedLayers, inside: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return the forward of a layer, which looks up in `adapted` at every call if it is recomputed.

    Args:
        layer: the layer, perhaps compiled.
        number: its number in the model.
        adapted: the layers of the model.
        inside: the compiled `_recomputed_forward` of the layer, for passes with packed schedules.
    """
    forward, modules = layer.forward, frozenset(layer.modules())
    # Without self, which the signature of a method lacks: "hidden_states" in most models.
    first = next(iter(inspect.signature(forward).parameters))

    @functools.wraps(forward)
    def run(*arguments: Any, **options: Any) -> Any:
        tree_pass, offload = options.get("tree_pass"), adapted.offload
        kept = tree_pass.kept if isinstance(tree_pass, TreePass) else None
        if number >= adapted.recomputed or not torch.is_grad_enabled():
            if kept is not None:
                kept.skipped |= modules
            return forward(*arguments, **options)
        packed = tree_pass.packed if isinstance(tree_pass, TreePass) else None
        if inside is not None and packed is not None and adapted.are_graphs:
            try:
                return inside(*arguments, **options)
            except compiler_errors() as error:
                # Nothing has run yet. This pass computes its attention twice, and later ones keep it outside.
                adapted.are_graphs = False
                _log.info("layers are compiled in several graphs: %s", str(error).strip().partition("\n")[0])
        if offload is None:
            return checkpoint(forward, *arguments, use_reentrant=False, **options)
        if kept is not None:
            kept.move = offload.put
        states = arguments[0] if arguments else options.pop(first)
        return offload.checkpoint(forward, states, *arguments[1:], **options)

    return run


def compiler_errors() -> type[Exception]:
    """Return the class of the errors that torch.compile raises while it traces or compiles a function."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def adapted_layers(model: Any) -> AdaptedLayers | None:
    """Return the layers that `adapt_layers` recomputes; None if it was not asked to, or found no layers."""
    adapted: AdaptedLayers | None = getattr(model, _LAYERS, None)
    return adapted


def num_adapted(model: Any) -> int:
    """Return the number of layers that can be recomputed, 0 without `adapted_layers`."""
    adapted = adapted_layers(model)
    return 0 if adapted is None else len(adapted.modules)


def set_recomputed(model: Any, count: int) -> None:
    """Recompute the first `count` layers from now on; `adapt_layers` with `checkpointing` must have adapted the model.

    Raises:
        TreepackError: if the model has fewer layers.
    """
    adapted = adapted_layers(model)
    assert adapted is not None, "call adapt_layers with checkpointing first"
    if count > len(adapted.modules):
        raise TreepackError(
            f"checkpoint_layers is {count} and {type(model).__name__} has {len(adapted.modules)} layers; give at most "
            "that many, or auto"
        )
    adapted.recomputed = count


@contextmanager
def recomputed_layers(model: Any, count: int) -> Iterator[None]:
    """Recompute only the first `count` layers in forward passes of the block; without `adapt_layers`, change nothing.

    Raises:
        TreepackError: as `set_recomputed`.
    """
    adapted = adapted_layers(model)
    if adapted is None:
        yield
        return
    before = adapted.recomputed
    set_recomputed(model, count)
    try:
        yield
    finally:
        adapted.recomputed = before


def recomputes(model: Any) -> bool:
    """Return True if layers are computed again in the backward pass."""
    adapted = adapted_layers(model)
    if adapted is not None and adapted.recomputed > 0:
        return True  # the flag of transformers is a walk through all modules
    # transformers renamed the flag within version 5.
    name = "is_activation_checkpointing"
    return bool(getattr(model, name) if hasattr(model, name) else model.is_gradient_checkpointing)


def takes_packed(model: Any) -> bool:
    """Return True if attention may be in the graphs of compiled layers: then these keep its results themselves."""
    adapted = adapted_layers(model)
    return has_compiled_layers(model) and (adapted is None or (adapted.offload is None and adapted.are_graphs))


def find_decoder(causal: Any) -> Any:
    """Return the part of a causal language model that computes its hidden states; None if it has no such part."""
    # Llama 4 keeps it under another name than the one it declares, so that its `base_model` is the model itself.
    if causal.base_model is not causal:
        return causal.base_model
    decoder = getattr(causal, "model", None) if causal.get_decoder() is causal else causal.get_decoder()
    return decoder if isinstance(decoder, nn.Module) else None


def find_layers(model: Any) -> list[nn.Module]:
    """Return the layers that transformers marks as units of recomputation, in order; empty for some models."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.base_model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _layer_values(config: Any, name: str) -> list[Any]:
    """Return the values of a field of a model's configuration: one, or one of each layer if layers differ in it.

    A field that the configuration lacks is None.
    """
    # Where layers differ, the configuration of the whole model refuses to answer. Gemma 4, head_dim -> [256, 512]
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    values = [getattr(layer, name, None) for layer in layers]
    # Gemma 3n has a list in one field.
    return [each for value in values for each in (value if isinstance(value, list) else [value])]


def head_widths(config: Any) -> list[int]:
    """Return the different head dimensions of queries and keys by a model's configuration, ascending."""
    default = config.hidden_size // (getattr(config, "num_attention_heads", None) or 1)
    return sorted({width or default for width in _layer_values(config, "head_dim")})

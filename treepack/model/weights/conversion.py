"""Trace transformers' conversion between the tensors of a checkpoint and the tensors of a model in memory.

    checkpoint                                     model in memory
    experts.0.gate_proj.weight [I, H]  --+
    experts.0.up_proj.weight   [I, H]  --+--->     experts.gate_up_proj [E, 2 I, H]
    experts.1.gate_proj.weight [I, H]  --+

    trace_loading    for each tensor in memory, the boxes of checkpoint tensors that it consists of
    trace_saving     for each tensor of a checkpoint, the boxes of tensors in memory that it consists of

transformers converts whole models at once. These functions run its conversion on tensors without memory
(`weights.traced`), so that a process can read or write any part of a model alone. If a conversion computes with
elements, there is no trace, and only transformers itself can convert the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from treepack.errors import TreepackError
from treepack.model.weights.traced import TracedTensor


def trace_loading(
    model: Any, stored: Mapping[str, tuple[list[int], torch.dtype]], *, source: str
) -> dict[str, TracedTensor] | None:
    """Return the boxes of the tensors of `model`, or None if the conversion computes with elements.

    Args:
        model: a model on the meta device. It learns which conversions its checkpoint needs, so that they are undone
            when it is saved.
        stored: shape and dtype of every tensor of the checkpoint.
        source: the checkpoint, for errors.

    Raises:
        TreepackError: a tensor has another shape than in the configuration.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return None
    state = {name: TracedTensor.whole(name, shape, dtype) for name, (shape, dtype) in stored.items()}
    try:
        with _quiet(), torch.random.fork_rng(devices=[]):
            made, report = type(model).from_pretrained(
                None,
                config=copy.deepcopy(model.config),
                state_dict=state,
                dtype=model.dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception:
        # Not hidden: without a trace the caller loads the model with transformers, which raises the same error.
        return None
    for name, expected, shape in report["mismatched_keys"]:
        raise TreepackError(
            f"{source}: {name} is mismatched in its weights (of shape {list(expected)}, and {list(shape)} by the "
            f"configuration); expected a whole checkpoint of {type(model).__name__}"
        )
    traced = made.state_dict(keep_vars=True)
    plan = {name: traced.get(name) for name in stored_tensors(model)}
    if not all(isinstance(each, TracedTensor) and each.is_known for each in plan.values()):
        return None
    if hasattr(made, "_weight_conversions"):
        model._weight_conversions = made._weight_conversions
    return plan


def trace_saving(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, TracedTensor] | None:
    """Return the boxes of every tensor of a checkpoint of `model`, or None if the conversion computes with elements.

    Args:
        model: the model, whose weights may be sharded.
        tensors: the tensors to save by name, such as `stored_tensors(model)`; boxes refer to these names.
    """
    from transformers.core_model_loading import revert_weight_conversion

    whole = {name: TracedTensor.whole(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    try:
        plan: dict[str, Any] = revert_weight_conversion(model, whole)
    except Exception:
        return None  # as in `trace_loading`
    return plan if all(isinstance(each, TracedTensor) and each.is_known for each in plan.values()) else None


def stored_tensors(model: Any) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint of `model` contains: parameters and persistent buffers, tied ones once."""
    state = model.state_dict(keep_vars=True)
    # Tied tensors get the name that transformers saves: {"lm_head.weight": "model.embed_tokens.weight"} -> the second
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name in sorted(state, key=lambda name: name in tied):
        if name not in ignored and id(state[name]) not in seen:
            named[name] = state[name]
            seen.add(id(state[name]))
    return {name: named[name] for name in state if name in named}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the reports of transformers about weights: the caller reads them itself."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)

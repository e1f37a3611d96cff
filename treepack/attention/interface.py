"""Tree attention under the names by which transformers' models call it.

    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="treepack_auto")
    model(input_ids, position_ids=..., subtree_end=..., schedule=..., use_cache=False)

A model hands its keyword arguments down to the attention function of every layer; `subtree_end`, the `schedule` that
`dispatch.prepare` made of it, the `kernel.Kept` of a forward pass under checkpointing, and for a probe the list
`record` travel that way, and the model builds no mask of its own. Whatever else a model asks of its attention is
refused, not ignored: a bias left out is a wrong gradient and no error.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import disable

from treepack.attention.dispatch import NAMES, tree_attention
from treepack.errors import TreepackError

IMPLEMENTATIONS = {impl: f"treepack_{impl}" for impl in ("auto", *NAMES)}

# What models pass along that says nothing about the scores.
_HARMLESS = frozenset({"position_ids", "cache_position", "is_causal", "layer_idx"})
_READ = frozenset({"scaling", "dropout", "subtree_end", "schedule", "sliding_window", "record", "kept"})
_REMEDY = "treepack computes plain softmax attention over the tree and nothing else, so train this model without it"
_PADDING = "expressed by subtree_end[i] = i + 1, so call the model without a mask"


class AttentionCall(NamedTuple):
    """One call of attention: the layer's attention module, and the head dimensions of query and key and of value."""

    module: nn.Module
    head_dims: tuple[int, int]


def register() -> None:
    """Make every implementation known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for impl, name in IMPLEMENTATIONS.items():
        # A compiled model leaves its graph here: kernels are launched, not traced.
        forward = disable(functools.partial(attention_forward, impl=impl))  # type: ignore[no-untyped-call]
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, no_mask)


def no_mask(*_: object, attention_mask: Tensor | None = None, **__: object) -> None:
    """The mask that a model builds: none, for `subtree_end` is the mask."""
    if attention_mask is not None:
        raise TreepackError(f"attention: an attention_mask is given; padding tokens are {_PADDING}")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    impl: str,
    **options: Any,
) -> tuple[Tensor, None]:
    """`dispatch.tree_attention` as transformers calls it: [B, H, T, D] in, [B, T, H, D_v] out."""
    check_request(module, query, attention_mask, options)
    if options.get("record") is not None:
        options["record"].append(AttentionCall(module, (query.shape[-1], value.shape[-1])))
    # Under autocast the three may differ: a norm of float32 weights promotes queries and keys but not values.
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        lower = torch.get_autocast_dtype(kind)
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
    kept = options.get("kept")
    out = tree_attention(
        query,
        key,
        value,
        options["subtree_end"],
        scale=options.get("scaling"),
        impl=impl,
        schedule=options.get("schedule"),
        kept=None if kept is None else (kept, module),
    )
    return out.transpose(1, 2).contiguous(), None


def check_request(module: nn.Module, query: Tensor, attention_mask: Tensor | None, options: dict[str, Any]) -> None:
    """Refuse, in one sentence, everything that a model asks of its attention and tree attention does not do.

    Raises:
        TreepackError: for a missing `subtree_end`, a mask, attention that is not causal, dropout, a sliding window
            shorter than the row, and any other option that is set (score caps, sinks, biases, head masks).
    """
    layer = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"
    if options.get("subtree_end") is None:
        raise TreepackError(
            f"{layer}: subtree_end is missing; call the model with the packed row's subtree_end, and if that is done, "
            "the model's code does not hand it on to its attention, so train another model"
        )
    if attention_mask is not None:
        raise TreepackError(f"{layer}: an attention mask is given; padding tokens are {_PADDING}")
    if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
        raise TreepackError(f"{layer}: the attention is not causal; {_REMEDY}")
    if options.get("dropout"):
        raise TreepackError(f"{layer}: dropout is {options['dropout']}; set the model's attention dropout to 0")
    window, length = options.get("sliding_window"), query.shape[-2]
    if window is not None and window < length:
        raise TreepackError(
            f"{layer}: the sliding window of {window} is shorter than the row of {length} tokens; "
            f"pack with a capacity of at most {window}"
        )
    for name, setting in options.items():
        if name not in _HARMLESS | _READ and _is_set(setting):
            raise TreepackError(f"{layer}: the model asks for {name}; {_REMEDY}")


def _is_set(setting: Any) -> bool:
    return not (setting is None or (isinstance(setting, (bool, int, float)) and setting == 0))

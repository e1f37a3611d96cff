"""Tree attention under the names that transformers' models call.

    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="treepack_auto")
    model(input_ids, position_ids=..., subtree_end=..., schedule=..., use_cache=False)

A model passes its keyword arguments to the attention function of every layer. Four arguments reach it in this way:
`subtree_end`, the `schedule` that `dispatch.prepare` made from it, the `autograd.Kept` of a forward pass under
checkpointing, and the list `record` of a probe. The model builds no mask of its own. Every other request of a model is
refused, not ignored, because a missing bias gives a wrong gradient and no error. A call without `subtree_end` is
refused too, unless `generation.allow_generation` permits it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import disable

from treepack.attention.dispatch import NAMES, tree_attention
from treepack.attention.generation import is_plain, plain_attention, plain_mask, records_gradients
from treepack.errors import TreepackError

IMPLEMENTATIONS = {impl: f"treepack_{impl}" for impl in ("auto", *NAMES)}

# Options that models pass and that do not change the scores.
_HARMLESS = frozenset({"position_ids", "cache_position", "is_causal", "layer_idx"})
_READ = frozenset({"scaling", "dropout", "subtree_end", "schedule", "sliding_window", "record", "kept"})
# Plain names of options that models pass under the names of their code.
_MEANINGS = {
    "s_aux": " (attention sinks)",
    "softcap": " (a cap on scores)",
    "position_bias": " (a bias on scores)",
    "head_mask": " (a mask of heads)",
}
_REMEDY = "treepack computes only causal softmax attention over the tree, so turn this off or train another model"
_PADDING = "expressed by subtree_end[i] = i + 1, so call the model without a mask"
_ITS_OWN_MASK = "its code makes an attention mask of its own"


class AttentionCall(NamedTuple):
    """One call of attention: the layer's attention module, head dimensions (query and key, value), dtype of scores."""

    module: nn.Module
    head_dims: tuple[int, int]
    dtype: torch.dtype


class BadCallError(TreepackError):
    """A refused call of attention.

    The message is for the caller of the model. `code` is the reason if the caller passed everything that is needed, so
    that only the code of the model can be the cause.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


def register() -> None:
    """Register every implementation with transformers; a second call changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for impl, name in IMPLEMENTATIONS.items():
        # A compiled model breaks its graph here, because kernels are launched and not traced.
        forward = disable(functools.partial(attention_forward, impl=impl))  # type: ignore[no-untyped-call]
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, attention_mask_of)


def attention_mask_of(
    *arguments: Any, attention_mask: Tensor | None = None, config: Any = None, **options: Any
) -> Tensor | None:
    """Return no mask when a model builds its mask, because `subtree_end` is the mask.

    If `allow_generation` permits a call without `subtree_end`, return the mask of sdpa.

    Raises:
        TreepackError: if the caller passed an attention mask.
    """
    if is_plain(config):
        return plain_mask(*arguments, attention_mask=attention_mask, config=config, **options)
    if attention_mask is not None:
        raise BadCallError(f"attention: an attention_mask is given; padding tokens are {_PADDING}", code=_ITS_OWN_MASK)
    return None


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
    """Call `dispatch.tree_attention` from a model of transformers: [B, H, T, D] in, [B, T, H, D_v] out.

    Raises:
        TreepackError: as in `check_request` and `dispatch.tree_attention`.
    """
    if options.get("subtree_end") is None and is_plain(getattr(module, "config", None)):
        _refuse_gradients(module, query, key, value)
        return plain_attention(module, query, key, value, attention_mask, options)
    check_request(module, query, attention_mask, options)
    # Under autocast the three dtypes may differ: a norm with float32 weights promotes queries and keys but not values.
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        lower = torch.get_autocast_dtype(kind)
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
    if options.get("record") is not None:
        options["record"].append(AttentionCall(module, (query.shape[-1], value.shape[-1]), query.dtype))
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
    """Refuse every request of a model that tree attention does not compute.

    Raises:
        TreepackError: if `subtree_end` is missing, if there is a mask or dropout, if attention is not causal, if the
            sliding window is shorter than the row, or if any other option is set (score caps, sinks, biases, head
            masks).
    """
    layer = _layer_name(module)
    if options.get("subtree_end") is None:
        raise BadCallError(
            f"{layer}: subtree_end did not reach this layer; pass subtree_end=batch.subtree_end for a packed row, and "
            "call treepack.allow_generation(model) before generate() or a plain forward pass",
            code=f"its code does not pass subtree_end on to its attention ({layer})",
        )
    if attention_mask is not None:
        raise BadCallError(
            f"{layer}: an attention mask is given; padding tokens are {_PADDING}", code=f"{_ITS_OWN_MASK} ({layer})"
        )
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
            raise TreepackError(f"{layer}: the model uses {name}{_MEANINGS.get(name, '')}; {_REMEDY}")


def _refuse_gradients(module: nn.Module, *tensors: Tensor) -> None:
    """Refuse to record gradients of a call without `subtree_end`.

    Raises:
        TreepackError: if gradients are recorded.
    """
    if records_gradients(*tensors):
        raise TreepackError(
            f"{_layer_name(module)}: subtree_end did not reach this layer, and gradients are recorded; pass "
            "subtree_end=batch.subtree_end to train, and generate or evaluate under torch.no_grad()"
        )


def _layer_name(module: nn.Module) -> str:
    return f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"


def _is_set(setting: Any) -> bool:
    # None, False, 0 and 0.0 -> False; a tensor is set whatever it contains
    return not (setting is None or (isinstance(setting, (bool, int, float)) and setting == 0))

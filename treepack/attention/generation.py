"""Let a model under tree attention also generate and evaluate: calls without `subtree_end` run through sdpa.

    allow_generation(model)
    model(input_ids, position_ids=..., subtree_end=..., use_cache=False)     tree attention, as before
    model.generate(prompts, attention_mask=...)                              sdpa: caches, padding, windows

It is an option, because a training step that forgets `subtree_end` would silently train with plain causal attention.
For the same reason, a call that records gradients is still refused.

Two steps depend on the arguments of a call. A layer sees `subtree_end`. But masks are built before the first layer
and from the configuration only, so hooks on the model's forward pass note if its caller passed `subtree_end`:

    hook of the model: push "tree" or "plain" -> mask of the implementation -> layers -> hook: pop
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import disable

from treepack.errors import TreepackError
from treepack.option_fields import expect_type

# Arguments of tree attention that sdpa does not have.
_OF_TREES = ("subtree_end", "schedule", "record", "tree_pass")

# One entry for each forward pass of a model of transformers that is running now, the outermost first: True if its
# caller passed subtree_end. A causal model calls its base model, so there are usually two.
_RUNNING: ContextVar[tuple[bool, ...]] = ContextVar("treepack_running", default=())


class _AlsoPlain(str):
    """The name of an implementation in the configuration of a model that `allow_generation` was called for.

    It equals the plain name, so transformers finds the same functions. Setting another attention removes it.
    """


def allow_generation(model: nn.Module) -> None:
    """Let `model` run calls without `subtree_end` through sdpa, such as `generate` and evaluation of plain batches.

    Only calls that record no gradients: training without `subtree_end` is refused as before. The results are equal to
    results of the same model after `set_attn_implementation("sdpa")`. Setting another attention implementation ends the
    permission.

    Args:
        model: a model of transformers under a treepack attention, or a trainer's wrapper around one.

    Raises:
        TreepackError: if it contains no model that uses treepack's attention.
    """
    from transformers import PreTrainedModel

    expect_type(model, nn.Module, "allow_generation: model", "load_model(...).model or transformers")
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    # The configuration of a part (a vision tower) may name another implementation, which stays as it is.
    named = [(each.config, getattr(each.config, "_attn_implementation", None) or "") for each in models]
    of_trees = [(config, name) for config, name in named if name.startswith("treepack_")]
    for config, name in of_trees:
        config._attn_implementation_internal = _AlsoPlain(name)
    if not of_trees:
        raise TreepackError(
            f"{type(model).__name__}: no part of it uses treepack's attention; load it with treepack.load_model, or "
            "with attn_implementation='treepack_auto' after treepack.register_attention()"
        )
    enter, leave = _hooks()
    for module in models:
        if enter not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(enter, with_kwargs=True)
            # After a failed forward pass too.
            module.register_forward_hook(leave, always_call=True)


@functools.cache
def _hooks() -> tuple[Any, Any]:
    # Not decorators: `disable` imports the compiler and with it triton, which takes seconds.
    return disable(_enter), disable(_leave)  # type: ignore[no-untyped-call]


def _enter(_: nn.Module, __: tuple[Any, ...], options: dict[str, Any]) -> None:
    _RUNNING.set((*_RUNNING.get(), options.get("subtree_end") is not None))


def _leave(*_: object) -> None:
    _RUNNING.set(_RUNNING.get()[:-1])


def is_plain_call(config: Any) -> bool:
    """Return True if a model with this configuration may run, and now runs, a call without `subtree_end`.

    Outside of a forward pass too: with a static cache, `generate` builds masks before it calls the model. False if any
    of the nested forward passes got `subtree_end`: the model did not pass it on, which must not go unnoticed.
    """
    return isinstance(getattr(config, "_attn_implementation", None), _AlsoPlain) and not any(_RUNNING.get())


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, None]:
    """Compute one call of attention by transformers' sdpa: [B, H, T, D] in, [B, T, H, D_v] out.

    The sdpa of transformers ignores sinks, caps of scores and the keys that an indexer selects, so calls with one of
    them are computed here.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if any(options.get(name) is not None for name in ("s_aux", "softcap", "indices")):
        return _dense_attention(query, key, value, mask, options), None
    theirs = {name: option for name, option in options.items() if name not in _OF_TREES}
    out: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **theirs)
    return out


def _dense_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Compute attention with sinks, a cap of scores, or selected keys: [B, H, T, D] in, [B, T, H, D_v] out.

    `options` are the model's: scaling, s_aux [H], softcap, indices [B, T, k] of keys.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = options.get("scaling")
    # [B, H, T, S]
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    cap, sinks, indices = (options.get(name) for name in ("softcap", "s_aux", "indices"))
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if mask is None:  # as in sdpa: a single query sees all keys, several are causal from the first key on
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        mask = mask.tril() if query.shape[2] > 1 else mask
    if indices is not None:
        chosen = torch.zeros(len(query), *scores.shape[-2:], dtype=torch.bool, device=scores.device)
        mask = mask & chosen.scatter(-1, indices.long(), value=True)[:, None]
    # Not -inf, because a padding token may see no key at all.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:  # one more column, whose value is 0
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1).to(scores.dtype)], -1)
    precision = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, -1, dtype=precision)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous()


def plain_mask(*arguments: Any, **options: Any) -> Tensor | None:
    """Build the mask of transformers' sdpa, from the same arguments."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    mask: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*arguments, **options)
    return mask


def records_gradients(*tensors: Tensor) -> bool:
    """Return True if a result of the tensors would have a gradient."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

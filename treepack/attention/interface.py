"""Tree attention under the names that transformers' models call.

    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="treepack_auto")
    model(input_ids, position_ids=..., subtree_end=..., schedule=..., use_cache=False)

A model passes its keyword arguments to the attention function of every layer. Four arguments reach it in this way:
`subtree_end`, the `schedules.BatchSchedules` made from it, the `TreePass` of the kept and carried tensors,
and the list `record` of a probe. Windows and chunks arrive as masks: a model requests one mask for each kind of layer
and passes it to these layers. It gets the `reach.Reach` of that kind instead of a mask. Sinks and caps of scores are
options of the call. Every other request of a model is refused, not ignored, because a missing bias gives a wrong
gradient and no error. A call without `subtree_end` is refused too, unless `generation.allow_generation` permits it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import disable, is_compiling

from treepack.attention.autograd import KeptOutputs
from treepack.attention.dispatch import NAMES, AnySchedule, BatchSchedules, resolve, takes_chains, tree_attention
from treepack.attention.generation import is_plain_call, plain_attention, plain_mask, records_gradients
from treepack.attention.indexed import AllAncestors, index_top_k
from treepack.attention.operator import PackedSchedules, kernel_attention
from treepack.attention.reach import KeyReach
from treepack.errors import TreepackError

IMPLEMENTATIONS = {impl: f"treepack_{impl}" for impl in ("auto", *NAMES)}

# Options that models pass and that do not change the scores.
_HARMLESS = frozenset({"position_ids", "cache_position", "is_causal", "layer_idx"})
_READ = frozenset("scaling dropout subtree_end schedule sliding_window record tree_pass s_aux softcap".split())
# Plain names of options that models pass under the names of their code.
_MEANINGS = {
    "position_bias": " (a bias on scores)",
    "head_mask": " (a mask of heads)",
    "indices": " (keys that an indexer selected)",
}
_REMEDY = (
    "tree attention is causal softmax attention with windows, chunks, sinks and caps of scores, so turn this off or "
    "train another model"
)
_MASK_GIVEN = (
    "call treepack.allow_generation(model) before generate() or a plain forward pass, and pass packed rows without a "
    "mask, because subtree_end[i] = i + 1 marks padding"
)
_ITS_OWN_MASK = "its code makes an attention mask of its own"


@dataclass(eq=False)
class TreePass:
    """Arguments of a pass: the tensors that attention keeps or carries, and the tokens that this rank has.

    A model passes it through its layers as one argument. torch.compile makes another version of a layer for each set
    of arguments and for each type among them, so the object is there in every pass, even if all fields are None. For
    the same reason it is not frozen: some versions of torch.compile read all fields of a frozen dataclass.

    Attributes:
        kept: outputs of attention for layers that are computed again; None if no layer is.
        carry: the `carry.stack.CarriedStack` of a row that runs in pieces; None for a whole row.
        packed: schedules for attention inside the graph of a compiled layer; None if a compiled layer breaks its graph
            at attention.
        share: the `sequence.share.TokenShare` of a row that several ranks compute together; None for one rank.
    """

    kept: KeptOutputs | None = None
    carry: Any = None
    packed: PackedSchedules | None = None
    share: Any = None


class AttentionKind(NamedTuple):
    """The attention that a layer asks for.

    head_dims   of query and key, of value
    reach       its window or chunk, or None
    has_sinks   True if it has attention sinks
    softcap     the cap of its scores, or None
    """

    head_dims: tuple[int, int]
    reach: KeyReach | None = None
    has_sinks: bool = False
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        """True if the layer has neither a window or chunk, nor sinks, nor a cap."""
        return self.reach is None and not self.has_sinks and self.softcap is None


class AttentionCall(NamedTuple):
    """One call of attention: the layer's attention module, the kind of its attention, the dtype of its scores."""

    module: nn.Module
    kind: AttentionKind
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
        launched = disable(functools.partial(_attention_forward, impl=impl))  # type: ignore[no-untyped-call]
        AttentionInterface.register(name, functools.partial(_attend, launched))
        AttentionMaskInterface.register(name, _attention_mask_of)


def _attention_mask_of(
    *arguments: Any, attention_mask: Tensor | None = None, config: Any = None, **options: Any
) -> Tensor | KeyReach | AllAncestors | None:
    """Return the reach of a kind of layers, instead of the mask that a model requests; None for all ancestors.

    A model with indexers gets an `AllAncestors` instead of None, because its code slices the mask.

    If `allow_generation` permits a call without `subtree_end`, return the mask of sdpa.

    Raises:
        TreepackError: if the caller passed an attention mask, or the model adds one.
    """
    if is_plain_call(config):
        return plain_mask(*arguments, attention_mask=attention_mask, config=config, **options)
    if attention_mask is not None:
        raise BadCallError(f"attention: an attention_mask is given; {_MASK_GIVEN}", code=_ITS_OWN_MASK)
    if options.get("use_vmap"):  # transformers sets it if the model's code adds a mask function
        raise BadCallError(f"attention: {_ITS_OWN_MASK}; {_REMEDY}", code=_ITS_OWN_MASK)
    size = options.get("local_size")
    if size is None:
        return None if index_top_k(config) is None else AllAncestors()
    return KeyReach("chunk" if _is_chunked(config, size) else "window", size)


def _is_chunked(config: Any, size: int) -> bool:
    """Return True if a mask of `size` tokens divides paths into chunks instead of sliding along them."""
    # transformers calls both masks with the same arguments, but a model has one kind of them.
    kinds = getattr(config, "layer_types", None) or ()
    chunk = getattr(config, "attention_chunk_size", None)
    return size == chunk and ("chunked_attention" in kinds or "sliding_attention" not in kinds)


def _attend(
    launched: Callable[..., tuple[Tensor, None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """Call `_attention_forward`, or the operator if a compiled layer may contain it."""
    tree_pass = options.get("tree_pass")
    packed = tree_pass.packed if isinstance(tree_pass, TreePass) else None
    if packed is None or not is_compiling():
        return launched(module, query, key, value, attention_mask, **options)
    check_request(module, None if isinstance(attention_mask, KeyReach) else attention_mask, options)
    query, key, value = _in_autocast_dtype(query, key, value)
    out = kernel_attention(
        query,
        key,
        value,
        packed,
        _reach_of(attention_mask, options),
        scale=options.get("scaling"),
        sinks=options.get("s_aux"),
        softcap=options.get("softcap") or None,
    )
    return out.transpose(1, 2).contiguous(), None


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | KeyReach | AllAncestors | None,
    *,
    impl: str,
    **options: Any,
) -> tuple[Tensor, None]:
    """Call `dispatch.tree_attention` from a model of transformers: [B, H, T, D] in, [B, T, H, D_v] out.

    Raises:
        TreepackError: as in `check_request` and `dispatch.tree_attention`.
    """
    if options.get("subtree_end") is None and is_plain_call(getattr(module, "config", None)):
        _refuse_gradients(module, query, key, value)
        assert not isinstance(attention_mask, KeyReach | AllAncestors)
        return plain_attention(module, query, key, value, attention_mask, options)
    reach = _reach_of(attention_mask, options)
    check_request(module, None if isinstance(attention_mask, KeyReach | AllAncestors) else attention_mask, options)
    query, key, value = _in_autocast_dtype(query, key, value)
    sinks, softcap = options.get("s_aux"), options.get("softcap") or None
    layer = AttentionKind((query.shape[-1], value.shape[-1]), reach, has_sinks=sinks is not None, softcap=softcap)
    if options.get("record") is not None:
        options["record"].append(AttentionCall(module, layer, query.dtype))
    tree_pass = options.get("tree_pass") or TreePass()
    carry, share, first = tree_pass.carry, tree_pass.share, 0
    if share is not None:
        # From own tokens of all heads to all tokens of this rank's heads
        query, key, value = share.attend(query, key, value)
        sinks = share.part_of_heads(sinks)
    joined: AbstractContextManager[tuple[Tensor, Tensor]] = nullcontext((key, value))
    if carry is not None:
        # The keys and values of the path, then of the piece; its first query is token `first` of them.
        first, joined = carry.first, carry.joined(module, key, value)
    impl, start, schedule = _schedule_of(layer, query, impl, options, first)
    with joined as (keys, values):
        out = tree_attention(
            query,
            keys,
            values,
            options["subtree_end"],
            scale=options.get("scaling"),
            impl=impl,
            schedule=schedule,
            kept=None if tree_pass.kept is None else (tree_pass.kept, module),
            start=start,
            sinks=sinks,
            softcap=softcap,
            first=first,
        )
    out = out.transpose(1, 2)
    return (out if share is None else share.tokens_of(out)).contiguous(), None


def _in_autocast_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Under autocast the three dtypes may differ: a norm with float32 weights promotes queries and keys but not values.
    kind = query.device.type
    if not torch.is_autocast_enabled(kind):
        return query, key, value
    lower = torch.get_autocast_dtype(kind)
    return query.to(lower), key.to(lower), value.to(lower)


def _reach_of(attention_mask: Any, options: dict[str, Any]) -> KeyReach | None:
    """Return the reach of a layer: from the mask that its model gave it, or else from the layer's own option."""
    if isinstance(attention_mask, KeyReach):
        return attention_mask
    window = options.get("sliding_window")
    return None if window is None else KeyReach("window", window)


def _schedule_of(
    layer: AttentionKind, query: Tensor, impl: str, options: dict[str, Any], first: int
) -> tuple[str, Tensor | None, AnySchedule]:
    """Return implementation, `start` and schedule of one layer."""
    schedules = options.get("schedule")
    if schedules is None:
        schedules = BatchSchedules(options["subtree_end"], first=first)
    if not isinstance(schedules, BatchSchedules):  # a schedule of rows without windows, from `dispatch.prepare`
        if layer.reach is None:
            return impl, None, schedules
        schedules = BatchSchedules(options["subtree_end"], first=first)
    schedules.check(options["subtree_end"], first=first)
    chosen = impl
    if impl == "auto":
        plain = layer.is_plain and not first  # flash has no rectangles
        chosen = resolve(impl, query.device, query.dtype, layer.head_dims, plain=plain)
    chains = schedules.varlen or (impl == "auto" and takes_chains(query.device, query.dtype, layer.head_dims))
    return chosen, *schedules.of(chosen, layer.reach, varlen=layer.is_plain and chains)


def check_request(module: nn.Module, attention_mask: Any, options: dict[str, Any]) -> None:
    """Refuse every request of a model that tree attention does not compute.

    Raises:
        TreepackError: if `subtree_end` is missing, if there is a mask or dropout, if attention is not causal, or if any
            unknown option is set (biases, head masks).
    """
    # The name only in errors: a compiled layer that reads it is compiled for each layer.
    if options.get("subtree_end") is None:
        layer = _layer_name(module)
        raise BadCallError(
            f"{layer}: subtree_end did not reach this layer; pass subtree_end=batch.subtree_end for a packed row, and "
            "call treepack.allow_generation(model) before generate() or a plain forward pass",
            code=f"its code does not pass subtree_end on to its attention ({layer})",
        )
    if attention_mask is not None:
        layer = _layer_name(module)
        raise BadCallError(f"{layer}: an attention mask is given; {_MASK_GIVEN}", code=f"{_ITS_OWN_MASK} ({layer})")
    if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
        raise TreepackError(f"{_layer_name(module)}: the attention is not causal; {_REMEDY}")
    if options.get("dropout"):
        raise TreepackError(
            f"{_layer_name(module)}: dropout is {options['dropout']}; set the model's attention dropout to 0"
        )
    for name, setting in options.items():
        if name not in _HARMLESS | _READ and _is_set(setting):
            raise TreepackError(f"{_layer_name(module)}: the model uses {name}{_MEANINGS.get(name, '')}; {_REMEDY}")


def _refuse_gradients(module: nn.Module, *tensors: Tensor) -> None:
    """Refuse to record gradients of a call without `subtree_end`."""
    if records_gradients(*tensors):
        raise TreepackError(
            f"{_layer_name(module)}: subtree_end did not reach this layer, and gradients are recorded; pass "
            "subtree_end=batch.subtree_end to train, and generate or evaluate under torch.no_grad()"
        )


def _layer_name(module: nn.Module) -> str:
    return f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"


def _is_set(setting: Any) -> bool:
    # None, False, 0, 0.0 and a tensor without elements -> False; any other tensor is set whatever it contains
    if isinstance(setting, Tensor):
        return setting.numel() > 0
    return not (setting is None or (isinstance(setting, (bool, int, float)) and setting == 0))

"""Test by a small forward pass that a model treats each branch of a tree as if it were alone.

    0 - 1 - 2 - 3
    |-- 4 - 5              twelve tokens, four branches: all in one packed row under tree attention,
    |    `- 6 - 7 - 8      against each branch alone under transformers' eager attention
    `-- 9 - 10 - 11

The test refuses a model that mixes tokens outside attention, needs more from its attention than softmax, or changes its
logits after the output layer by more than a scale and a soft cap. It also refuses a model whose code fails on a packed
row. Every refusal is one sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from treepack.attention import IMPLEMENTATIONS
from treepack.attention.indexed import skip_indexers
from treepack.attention.interface import AttentionKind, BadCallError
from treepack.errors import MODELS_HINT, TreepackError
from treepack.model.accept.observation import ForwardObservation, check_observed_attention, observe
from treepack.model.foreign_errors import translate_errors
from treepack.model.head.output_head import measure_logit_map
from treepack.model.layers import find_decoder
from treepack.model.stored_weights import stored_kind
from treepack.recurrent.entry import enter, plain_functions

# Maximum relative difference of a branch in the tree from the branch alone. float64 gets only 1e-5 because the eager
# softmax of transformers runs in float32. float16 and bfloat16 allow about 10 and 6 rounding units (2**-10 and 2**-7).
_PROBE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

_FAILS = "its code fails on a packed row, which has positions of its own and no attention mask"

# The tree above. Entry i is the parent of token i, and one past the last token of its subtree: token 4 has the subtree
# 4 .. 8, so its end is 9.
_PROBE_PARENT = (-1, 0, 1, 2, 0, 4, 4, 6, 7, 0, 9, 10)
_PROBE_END = (12, 4, 4, 4, 9, 6, 9, 9, 9, 12, 12, 12)
_PROBE_LEAVES = (3, 5, 8, 11)


@contextmanager
def use_attention(model: Any, name: str) -> Iterator[None]:
    """Switch `model` to another attention implementation of transformers, and back at the end of the block.

    With an attention of transformers, recurrent layers are computed by transformers too, in plain torch.
    """
    # A vision tower has a configuration and an implementation of its own. By id, because configurations have no hash.
    name_of_setting = "_attn_implementation_internal"
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    previous = [
        (config, getattr(config, name_of_setting)) for config in configs.values() if hasattr(config, name_of_setting)
    ]
    model.set_attn_implementation(name)
    try:
        with nullcontext() if name in IMPLEMENTATIONS.values() else plain_functions(model):
            yield
    finally:
        for config, setting in previous:
            setattr(config, name_of_setting, setting)


def probe(
    model: Any, *, source: str, device: torch.device | None = None, wrapped: Any = None
) -> tuple[AttentionKind, ...]:
    """Run a small tree and refuse a model that does not treat each branch as if it were alone.

    Three checks: every layer calls tree attention; the logits are the output layer applied to the hidden states,
    with a scale and a soft cap that are measured and kept (`output_head.logit_map_of`); the hidden states of every
    branch equal the hidden states of the branch alone under transformers' eager attention. Weights, gradients, random
    state, modes of modules and attention implementation do not change. From then on, indexers of the model skip rows
    (`attention.indexed`).

    Args:
        model: a causal language model of transformers, registered for tree attention.
        source: the model's name in error messages.
        device: device of the inputs, by default the device of the model's weights.
        wrapped: the model with the wrappers of a trainer, which the probe runs; None for the model itself. All ranks
            that share its weights must call this function together.

    Returns:
        the kind of attention of each call, in the order of the layers.

    Raises:
        TreepackError: if a check fails; the message names the check.
    """
    if find_decoder(model) is None or model.get_output_embeddings() is None:
        raise TreepackError(
            f"{source}: its hidden states cannot be separated from its output layer, which treepack applies in chunks; "
            f"{MODELS_HINT}"
        )
    device = device or next(iter(model.parameters())).device
    skip_indexers(model)
    enter(model)
    wrapped, embedding = model if wrapped is None else wrapped, model.get_input_embeddings()
    # A weight that a trainer has sharded may have length 0 here, and a layer with an adapter has its weight alone.
    vocabulary = getattr(embedding, "num_embeddings", None) or len(embedding.weight)
    # 7919 is a prime, so the ids differ from each other: 19, 38, 7, 26, ... in a vocabulary of 50.
    ids = torch.arange(1, len(_PROBE_PARENT) + 1, device=device) * 7919 % vocabulary
    kind, fails, hint = stored_kind(model.config), _FAILS, MODELS_HINT
    if kind is not None:
        fails = f"its quantised layers ({kind}) or its code cannot compute a packed row here"
        hint = "give the checkpoint in bf16 of the same model"
    with _undisturbed(wrapped, device), translate_errors(f"{source}: {fails}", hint):
        tree = _run_tree(model, wrapped, ids, source)
        branches = [torch.tensor(_path(leaf), device=device) for leaf in _PROBE_LEAVES]
        # Every model has the eager attention, and it is code of transformers, not of treepack. Without padding, so
        # positions are 0, 1, 2, ... by default. [1, length of the branch, D] each
        alone = [_run_alone(model, wrapped, ids[path]) for path in branches]
    paired = [(tree.states[0, path], states[0]) for path, states in zip(branches, alone, strict=True)]
    error = _branch_error(paired, _compute_dtype(tree))
    # "not error <=" instead of "error >": a NaN must fail.
    if not error <= _PROBE_TOLERANCE[_compute_dtype(tree)]:
        cause = "its code mixes tokens outside attention, or needs more than their positions"
        if kind is not None:
            cause = f"its quantised layers ({kind}) round the numbers of tokens too; give the weights in bf16"
        raise TreepackError(
            f"{source}: a branch in a tree gets other hidden states than alone (relative difference {error:.1e}), so "
            f"{cause}; {MODELS_HINT}"
        )
    return tuple(call.kind for call in tree.attention.calls)


@contextmanager
def _undisturbed(model: Any, device: torch.device) -> Iterator[None]:
    """Run the model in eval mode, uncompiled and without gradients; restore modes and random state at the end."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False  # not model.eval(): this must be undone module by module
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _run_tree(model: Any, wrapped: Any, ids: Tensor, source: str) -> ForwardObservation:
    """Return the observed forward pass of the probe tree, after the checks of attention and logits.

    Raises:
        TreepackError: if the attention refuses a call, or a check fails.
    """
    # Position of a token = number of its ancestors: [0, 1, 2, 3, 1, 2, 2, 3, 4, 1, 2, 3].
    positions = torch.tensor([len(_path(i)) - 1 for i in range(len(ids))], device=ids.device)
    end = torch.tensor(_PROBE_END, device=ids.device)
    row = {"input_ids": ids[None], "position_ids": positions[None], "subtree_end": end[None], "use_cache": False}
    try:
        # The probe tests the model, not the attention, so it runs the implementation whose result is not in doubt.
        with use_attention(model, IMPLEMENTATIONS["reference"]), observe(model) as seen:
            seen.logits = wrapped(**row, record=seen.attention).logits
    except BadCallError as error:
        # The call above is complete, so the reason is in the code of the model.
        raise TreepackError(f"{source}: {error.code}; {MODELS_HINT}") from error
    except TreepackError as error:
        raise TreepackError(f"{source}: {error}") from error
    check_observed_attention(seen, model, source=source)
    assert seen.logits is not None
    measure_logit_map(model, seen.logits, source=source)
    return seen


def _run_alone(model: Any, wrapped: Any, ids: Tensor) -> Tensor:
    """Return the hidden states [1, length of `ids`, D] under transformers' eager attention."""
    with use_attention(model, "eager"), observe(model) as seen:
        wrapped(input_ids=ids[None], use_cache=False)
    return seen.states


def _path(token: int) -> list[int]:
    # 5 -> [0, 4, 5]
    return [] if token < 0 else [*_path(_PROBE_PARENT[token]), token]


def _compute_dtype(seen: ForwardObservation) -> torch.dtype:
    """Return the dtype of lowest precision in which the model computed: under autocast, that of its layers."""
    dtypes = {call.dtype for call in seen.attention.calls} | {call.dtype for call in seen.attention.recurrent}
    return max({seen.states.dtype, *dtypes}, key=_PROBE_TOLERANCE.__getitem__)


def _branch_error(branches: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> float:
    """Return the relative difference of the states [L, D] of branches in the tree from the same branches alone."""
    # |tree - alone| / |alone| of each token, in Euclidean norms; 0 / 0 counts as 0
    errors = [
        (tree.double() - alone.double()).norm(dim=-1) / alone.double().norm(dim=-1).clamp(min=1e-300)
        for tree, alone in branches
    ]
    if dtype in (torch.float64, torch.float32):
        return float(torch.cat(errors).max())
    # In low precision rounding alone may send a token to another expert, so single tokens may differ: the median. The
    # first branch and the roots have nothing before them that is not their own, so they are left out.
    return float(torch.cat([each[1:] for each in errors[1:]]).median())

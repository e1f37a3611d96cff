"""Test by a small forward pass that a model treats each branch of a tree as if it were alone.

    0 - 1 - 2 - 3
    |-- 4 - 5              twelve tokens, four branches: all in one packed row under tree attention,
    |    `- 6 - 7 - 8      against each branch alone under transformers' eager attention
    `-- 9 - 10 - 11

The test refuses a model that mixes tokens outside attention, needs more from its attention than softmax, or changes its
logits after the output layer. It also refuses a model whose code fails on a packed row. Every refusal is one sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from treepack.attention.interface import AttentionCall
from treepack.errors import TreepackError
from treepack.model.compatibility import NO_INTERFACE, REQUIREMENT, translate_errors

# Maximum relative difference of a branch in the tree from the branch alone. float64 gets only 1e-5 because the eager
# softmax of transformers runs in float32. float16 and bfloat16 allow about 10 and 6 rounding units (2**-10 and 2**-7).
PROBE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# The tree above. Entry i is the parent of token i, and one past the last token of its subtree: token 4 has the subtree
# 4 .. 8, so its end is 9.
_PROBE_PARENT = (-1, 0, 1, 2, 0, 4, 4, 6, 7, 0, 9, 10)
_PROBE_END = (12, 4, 4, 4, 9, 6, 9, 9, 9, 12, 12, 12)
_PROBE_LEAVES = (3, 5, 8, 11)


@contextmanager
def use_attention(model: Any, name: str) -> Iterator[None]:
    """Switch `model` to another attention implementation of transformers, and back at the end of the block."""
    previous = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


def probe(model: Any, *, source: str, device: torch.device | None = None) -> frozenset[tuple[int, int]]:
    """Run a small tree and refuse a model that does not treat each branch as if it were alone.

    Three checks: every layer calls tree attention once; the hidden states of every branch equal the hidden states of
    the branch alone under transformers' eager attention; the logits are the output layer applied to the hidden states.

    Args:
        model: a causal language model of transformers; the tree runs under its current attention implementation.
        source: the model's name in error messages.
        device: device of the inputs, by default the device of the model's weights.

    Returns:
        the head dimensions of the layers, as pairs (of query and key, of value).

    Raises:
        TreepackError: if a check fails; the message names the check.
    """
    if model.base_model is model or model.get_output_embeddings() is None:
        raise TreepackError(
            f"{source}: its hidden states cannot be separated from its output layer; {REQUIREMENT} and one output layer"
        )
    device = device or next(iter(model.parameters())).device
    vocabulary = len(model.get_input_embeddings().weight)
    # 7919 is a prime, so the ids differ from each other: 19, 38, 7, 26, ... in a vocabulary of 50.
    ids = torch.arange(1, len(_PROBE_PARENT) + 1, device=device) * 7919 % vocabulary
    with torch.no_grad(), translate_errors(f"{source}: it cannot run a packed row", REQUIREMENT):
        tree, logits, calls = _probe_tree(model, ids, source)
        expected = _output_layer(model, tree)
        branches = [torch.tensor(_path(leaf), device=device) for leaf in _PROBE_LEAVES]
        with use_attention(model, "eager"):  # every model has it, and it is code of transformers, not of treepack
            # states [length of the branch, D] each; without padding, so positions are 0, 1, 2, ... by default
            alone = [model.base_model(input_ids=ids[path][None], use_cache=False)[0][0] for path in branches]
        _compare(logits, expected, f"{source}: its logits are not its output layer of the hidden states")
        for path, states in zip(branches, alone, strict=True):
            _compare(tree[path], states, f"{source}: a branch in a tree gets other hidden states than alone")
    return frozenset(call.head_dims for call in calls)


def _probe_tree(model: Any, ids: Tensor, source: str) -> tuple[Tensor, Tensor, list[AttentionCall]]:
    """Return hidden states [T, D] and logits [T, V] of the probe tree, and the attention calls of the hidden states.

    Raises:
        TreepackError: if the attention refuses a call, or the calls do not match the layers.
    """
    # Position of a token = number of its ancestors: [0, 1, 2, 3, 1, 2, 2, 3, 4, 1, 2, 3].
    positions = torch.tensor([len(_path(i)) - 1 for i in range(len(ids))], device=ids.device)
    end = torch.tensor(_PROBE_END, device=ids.device)
    calls: list[AttentionCall] = []
    row = {"input_ids": ids[None], "position_ids": positions[None], "subtree_end": end[None], "use_cache": False}
    try:
        tree: Tensor = model.base_model(**row, record=calls)[0][0]
        logits: Tensor = model(**row).logits[0]
    except TreepackError as error:
        raise TreepackError(f"{source}: {error}") from error  # the attention refused the call; add the model's name
    layers = model.config.get_text_config().num_hidden_layers
    if not calls:
        raise TreepackError(f"{source}: {NO_INTERFACE}; {REQUIREMENT}")
    # Fewer calls than layers: a layer mixes tokens by other means. Fewer modules than calls: one of them attends twice.
    modules = {call.module for call in calls}
    if len(calls) != layers or len(modules) != layers:
        raise TreepackError(
            f"{source}: its {layers} layers call attention {len(calls)} times, from {len(modules)} modules; "
            f"{REQUIREMENT}"
        )
    return tree, logits, calls


def _path(token: int) -> list[int]:
    # 5 -> [0, 4, 5]
    return [] if token < 0 else [*_path(_PROBE_PARENT[token]), token]


def _output_layer(model: Any, states: Tensor) -> Tensor:
    head = model.get_output_embeddings()
    return linear(states, head.weight, getattr(head, "bias", None))


def _compare(values: Tensor, expected: Tensor, complaint: str) -> None:
    error = float((values.double() - expected.double()).norm() / expected.double().norm())
    # "not error <=" instead of "error >": a NaN must fail.
    if not error <= PROBE_TOLERANCE[expected.dtype]:
        raise TreepackError(f"{complaint} (relative difference {error:.1e}); {REQUIREMENT}")

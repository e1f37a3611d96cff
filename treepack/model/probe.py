"""Does a model treat each branch of a tree as if it were alone? Found out by running one.

    0 - 1 - 2 - 3
    |-- 4 - 5              four branches of twelve tokens: one packed row under tree attention against
    |    `- 6 - 7 - 8      each branch alone under transformers' eager attention
    `-- 9 - 10 - 11

A model that mixes tokens outside attention, asks more of its attention than softmax, or changes its logits after the
output layer is refused in one sentence, and so is one whose code fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from treepack.attention import IMPLEMENTATIONS
from treepack.attention.interface import AttentionCall
from treepack.errors import TreepackError

# Relative error of a branch in the tree against the branch alone; transformers' eager softmax is float32 at best.
PROBE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

ONLY = "treepack trains models whose every layer is plain softmax attention"
_UNHEARD = "its code does not hand attention to transformers' attention interface"

# The tree above.
_PROBE_PARENT = (-1, 0, 1, 2, 0, 4, 4, 6, 7, 0, 9, 10)
_PROBE_END = (12, 4, 4, 4, 9, 6, 9, 9, 9, 12, 12, 12)
_PROBE_LEAVES = (3, 5, 8, 11)


def one_line(error: Exception) -> str:
    """What `error` says, in one short line."""
    if isinstance(error, KeyError) and error.args and error.args[0] in IMPLEMENTATIONS.values():
        return _UNHEARD
    return shorten(str(error), 200, placeholder=" ...") or type(error).__name__


@contextmanager
def refusing(complaint: str, remedy: str) -> Iterator[None]:
    """Turn whatever code that is not ours raises into one sentence; the cause stays attached."""
    try:
        yield
    except TreepackError:
        raise
    except Exception as error:
        raise TreepackError(f"{complaint} ({one_line(error)}); {remedy}") from error


@contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """Run `model` under another of transformers' attention implementations."""
    own = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def probe(model: Any, *, source: str, device: torch.device | None = None) -> frozenset[tuple[int, int]]:
    """Run a small tree and refuse a model that does not treat each branch as if it were alone.

    Three things are checked: every layer calls tree attention once; the hidden states of every branch are those
    of the branch alone under transformers' eager attention; the logits are the output layer of the hidden states.
    The tree goes through the attention that the model is set to, on `device`, by default where its weights are.

    Returns:
        the head dimensions (of query and key, of value) of the layers.

    Raises:
        TreepackError: saying which of them fails.
    """
    if model.base_model is model or model.get_output_embeddings() is None:
        raise TreepackError(f"{source}: its hidden states and output layer are not apart; {ONLY} and one output layer")
    device = device or next(iter(model.parameters())).device
    vocabulary = len(model.get_input_embeddings().weight)
    ids = torch.arange(1, len(_PROBE_PARENT) + 1, device=device) * 7919 % vocabulary
    with torch.no_grad(), refusing(f"{source}: it cannot run a packed row", ONLY):
        tree, logits, calls = _probe_tree(model, ids, source)
        expected = _output_layer(model, tree)
        branches = [torch.tensor(_path(leaf), device=device) for leaf in _PROBE_LEAVES]
        with attention_of(model, "eager"):
            alone = [model.base_model(input_ids=ids[path][None], use_cache=False)[0][0] for path in branches]
        _compare(logits, expected, f"{source}: its logits are not its output layer of the hidden states")
        for path, states in zip(branches, alone, strict=True):
            _compare(tree[path], states, f"{source}: a branch in a tree gets other hidden states than alone")
    return frozenset(call.head_dims for call in calls)


def _probe_tree(model: Any, ids: Tensor, source: str) -> tuple[Tensor, Tensor, list[AttentionCall]]:
    """Hidden states [T, D] and logits [T, V] of the probe tree, and the calls of attention behind the first."""
    positions = torch.tensor([len(_path(i)) - 1 for i in range(len(ids))], device=ids.device)
    end = torch.tensor(_PROBE_END, device=ids.device)
    calls: list[AttentionCall] = []
    row = {"input_ids": ids[None], "position_ids": positions[None], "subtree_end": end[None], "use_cache": False}
    try:
        tree: Tensor = model.base_model(**row, record=calls)[0][0]
        logits: Tensor = model(**row).logits[0]
    except TreepackError as error:
        raise TreepackError(f"{source}: {error}") from error
    layers = model.config.get_text_config().num_hidden_layers
    if not calls:
        raise TreepackError(f"{source}: {_UNHEARD}; {ONLY}")
    modules = {call.module for call in calls}
    if len(calls) != layers or len(modules) != layers:
        raise TreepackError(
            f"{source}: its {layers} layers call attention {len(calls)} times, from {len(modules)} modules; {ONLY}"
        )
    return tree, logits, calls


def _path(token: int) -> list[int]:
    return [] if token < 0 else [*_path(_PROBE_PARENT[token]), token]


def _output_layer(model: Any, states: Tensor) -> Tensor:
    head = model.get_output_embeddings()
    return linear(states, head.weight, getattr(head, "bias", None))


def _compare(found: Tensor, expected: Tensor, complaint: str) -> None:
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not error <= PROBE_TOLERANCE[expected.dtype]:
        raise TreepackError(f"{complaint} (relative difference {error:.1e}); {ONLY}")

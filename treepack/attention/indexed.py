"""Skip indexers, which select keys for each query, on paths so short that they would select every key.

    trajectory of L tokens alone:  hidden states --indexer--> the k keys with the highest index scores --> attention
    row of a tree:                 hidden states ----------------------------------------------------> tree attention

DeepSeek-V3.2, GLM-5 and their relatives have an indexer in a layer. While L <= k it selects every token before a query,
so attention is plain softmax attention. On a row it would select the best k tokens of the whole row, including tokens
of other branches. So under tree attention it does not run, and `compatibility.position_limit` refuses paths of more
than k tokens. The parameters of an indexer have no gradient from the loss, in a tree or alone.

The code of such a model slices its mask, so its layers get an `AllAncestors` instead. An indexer that gets it returns
no keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class AllAncestors:
    """The mask of layers in which a token sees all of its ancestors; every slice of it is such a mask too."""

    def __getitem__(self, _: object) -> AllAncestors:
        return self


def index_top_k(config: Any) -> int | None:
    """Return the number of keys that the indexers of a model select; None if it has no indexers."""
    size = getattr(config, "index_topk", None)
    return size if isinstance(size, int) else None


def skip_indexers(model: nn.Module) -> None:
    """Let the indexers of `model` select no keys in a forward pass under tree attention; a second call does nothing."""
    for module in model.modules():
        # The classes have no common base: DeepseekV32Indexer, GlmMoeDsaIndexer.
        if type(module).__name__.endswith("Indexer") and "forward" not in module.__dict__:
            module.forward = functools.partial(_unless_tree, module.forward)


def _unless_tree(forward: Callable[..., Any], hidden: Tensor, *arguments: Any, **options: Any) -> Any:
    """Return no keys, int32 [B, T, 0], if an argument is `AllAncestors`; else run the indexer."""
    if any(isinstance(value, AllAncestors) for value in (*arguments, *options.values())):
        return torch.empty(*hidden.shape[:2], 0, dtype=torch.int32, device=hidden.device)
    return forward(hidden, *arguments, **options)

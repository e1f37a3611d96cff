"""Tiny models with a random value head in float64: as they are, and with tree attention."""

from __future__ import annotations

import functools
from typing import Any

from support.oracle_model import tiny_model
from treepack.attention import register
from treepack.model.loaded import LoadedModel
from treepack.model.value_head import add_value_head, named_weights


def with_head(causal: Any) -> Any:
    """Put a random value head in float64 on a model."""
    weights = named_weights(causal, causal, add_value_head(causal, (), random=7))
    for name, parameter in causal.named_parameters():
        if name in weights:
            parameter.data = weights[name].double()
    return causal


@functools.cache
def plain(kind: str) -> Any:
    return with_head(tiny_model(kind))


@functools.cache
def critic(kind: str) -> LoadedModel:
    register()
    return LoadedModel(with_head(tiny_model(kind, attention="treepack_reference")), kind, "reference", ())

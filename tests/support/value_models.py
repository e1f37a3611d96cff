"""Tiny models with a random value head in float64: as they are, and with tree attention."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from support.oracle_model import tiny_model
from support.oracle_objectives import Rollout, own_values
from support.packed_objectives import rollouts
from treepack.attention import register
from treepack.model.head.value_head import add_value_head, named_weights
from treepack.model.loaded import LoadedModel


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


@functools.cache
def valued(kind: str = "qwen3", *, seed: int = 0, count: int = 10) -> tuple[Rollout, ...]:
    """Rollouts with random returns, and old values near the values of the model, so that some of them are clipped."""
    rng = np.random.default_rng(seed)
    result = []
    for rollout in rollouts(kind, seed=seed, count=count):
        with torch.no_grad():
            values = own_values(plain(kind), rollout)
        size = len(rollout.tokens)
        old = [float(values.get(j, torch.zeros(()))) + float(rng.normal()) * 0.2 for j in range(size)]
        result.append(replace(rollout, returns=rng.normal(size=size).tolist(), old_values=old))
    return tuple(result)

"""Gradients of packed rows, and the comparison with gradients of trajectories alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from support.oracle_model import (
    gradients,
    tiny_model,
    worst_error,
)
from treepack.attention import IMPLEMENTATIONS, register
from treepack.data.batch import Batch
from treepack.model.forward import row_loss
from treepack.model.loaded import LoadedModel


@functools.cache
def plain(kind: str) -> Any:
    return tiny_model(kind)


@functools.cache
def packed(kind: str, attention: str) -> LoadedModel:
    register()
    return LoadedModel(tiny_model(kind, attention=IMPLEMENTATIONS[attention]), kind, attention, ())


def gradients_of(loaded: LoadedModel, batches: Sequence[Batch], *, chunk: int = 2048) -> Gradients:
    loaded.model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = row_loss(loaded, batch, chunk=chunk)
        torch.autograd.backward(loss)
        total += loss.item()
    return total, gradients(loaded.model)


def assert_equal(actual: Gradients, expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert actual[0] == pytest.approx(expected[0].item(), rel=TOLERANCE)
    assert worst_error(actual[1], expected[1]) <= TOLERANCE


TOLERANCE = 1e-9


Gradients = tuple[float, dict[str, Tensor]]

"""Packed rows and a tiny model for tests of objectives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.oracle_model import VOCABULARY, tiny_model, write_rows
from support.oracle_objectives import Rollout, own_logprobs
from support.strategies import make
from treepack.attention import register
from treepack.data.dataset import PackedDataset
from treepack.model.loaded import LoadedModel
from treepack.ragged import RaggedArray
from treepack.trajectory import Trajectory, spans_of_mask


@functools.cache
def plain(kind: str) -> Any:
    return tiny_model(kind)


@functools.cache
def packed_model(kind: str) -> LoadedModel:
    register()
    return LoadedModel(tiny_model(kind, attention="treepack_reference"), kind, "reference", ())


@functools.cache
def rollouts(kind: str = "qwen3", *, seed: int = 0, count: int = 10, noise: float = 0.4) -> tuple[Rollout, ...]:
    """Random rollouts of two groups with weights of their own, most of which branch off an earlier one or repeat it."""
    rng = np.random.default_rng(seed)
    counts_as = np.random.default_rng([seed, 1]).choice([0.3, 1.0, 2.0], count).tolist()
    result: list[Rollout] = []
    for i in range(count):
        base = result[int(rng.integers(len(result)))].tokens if result and i != count // 2 else []
        cut = int(rng.integers(len(base) // 2, len(base) + 1)) if base else 0
        tokens = base[:cut] + rng.integers(0, VOCABULARY, int(rng.integers(0 if cut > 1 else 2, 7))).tolist()
        size = len(tokens)
        weights = [0.0, *rng.choice([0.0, 1.0, 1.0, 0.25, 3.0], size - 1).tolist()]
        weights[int(rng.integers(1, size))] = 1.0
        rollout = Rollout(
            tokens=tokens,
            weights=weights,
            advantages=rng.normal(size=size).tolist(),
            old=[0.0] * size,
            ref=[0.0] * size,
            sampling=[0.0] * size,
            group="ab"[i % 2],
            reward=float(rng.integers(0, 3)),
            weight=counts_as[i],
        )
        with torch.no_grad():
            current, _ = own_logprobs(plain(kind), rollout)
        old, ref, sampling = (
            [float(np.float32(float(current.get(j, 0)) + rng.normal() * noise)) for j in range(size)] for _ in range(3)
        )
        result.append(replace(rollout, old=old, ref=ref, sampling=sampling))
    return tuple(result)


def as_trajectories(samples: Sequence[Rollout], *, without: Sequence[str] = ()) -> list[Trajectory]:
    result = []
    for i, rollout in enumerate(samples):
        starts, ends, weights = (part.tolist() for part in spans_of_mask(np.array(rollout.weights)))
        columns: dict[str, Any] = {
            column: [getattr(rollout, name)[j] for j in rollout.trained]
            for column, name in COLUMNS.items()
            if column not in without
        }
        for name in ("returns", "old_values"):
            if name not in without and (values := getattr(rollout, name)) is not None:
                columns[name] = [values[j] for j in rollout.trained]
        if "reward" not in without:
            columns["reward"] = rollout.reward
        if rollout.temperatures is not None and "temperatures" not in without:
            columns["temperatures"] = np.array([rollout.temperatures[j] for j in rollout.trained], np.float32)
        if rollout.kept is not None:
            columns["kept_ids"] = RaggedArray.of([rollout.kept[j] for j in rollout.trained], np.int32)
        spans = list(zip(starts, ends, weights, strict=True))
        columns["weight"] = rollout.weight
        made = make(f"t{i}", rollout.tokens, spans=spans, group=rollout.group, **columns)
        if rollout.rollout is not None:
            made = replace(made, rollout_id=rollout.rollout, rollout_part=i, source="made")
        result.append(made)
    return result


COLUMNS = {"advantages": "advantages", "old_logprobs": "old", "ref_logprobs": "ref", "sampling_logprobs": "sampling"}


def opened(
    path: Path, samples: Sequence[Rollout], rows: Sequence[int], *, without: Sequence[str] = ()
) -> PackedDataset:
    return PackedDataset(write_rows(path, as_trajectories(samples, without=without), rows), terms=True, multiple=8)

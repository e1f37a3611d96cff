"""The divergence of the sampler from the trainer by position: over any packing, in chunks and in pieces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.oracle_model import write_rows
from support.oracle_objectives import own_logprobs
from support.packed_objectives import as_trajectories, packed_model, plain, rollouts
from treepack.carry.backward import CarryOptions, backward_row
from treepack.data.dataset import PackedDataset
from treepack.model.forward import WholeRows
from treepack.objectives import policy_terms
from treepack.objectives.losses import step_means
from treepack.objectives.objective import choose_objective
from treepack.objectives.row_numbers import LossPart

BOUNDS = (2, 3, 4, 6, 40)


@pytest.mark.parametrize("old", ["recorded", "sampler"])
def test_the_divergence_from_the_sampler_is_known_by_position(
    tmp_path: Path, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_terms, "POSITIONS", BOUNDS)
    objective, samples = choose_objective("ppo", old_logprobs=old), rollouts()
    trajectories = as_trajectories(samples)
    if old == "recorded":  # a missing value is left out if no ratio needs it
        trajectories[-1:] = as_trajectories(samples, without=["sampling_logprobs"])[-1:]
        samples = samples[:-1]
    divergence, weight = np.zeros(6), np.zeros(6)
    for one in samples:
        current, _ = own_logprobs(plain("qwen3"), one)
        for j in one.trained:
            x = (current[j].item() if old == "sampler" else one.old[j]) - one.sampling[j]
            counts = one.weight * one.weights[j]
            place = sum(j >= bound for bound in BOUNDS)
            divergence[place] += counts * (np.exp(x) - 1 - x)
            weight[place] += counts
    known = np.flatnonzero(weight)
    assert len(known) > 3
    expected = {policy_terms.SAMPLER_KL[i]: divergence[i] / weight[i] for i in known}
    expected["sampler_kl"] = divergence.sum() / weight.sum()
    loaded = packed_model("qwen3")
    for i, rows in enumerate(([0] * 10, [0, 1, 1, 0, 1, 1, 0, 2, 2, 1])):
        dataset = PackedDataset(write_rows(tmp_path / str(i), trajectories, rows), terms=True, multiple=8)
        for pieces in (False, True):
            sums: dict[str, float] = {}
            for batch in dataset:
                part = LossPart(objective, torch.ones(len(batch.trajectory_ids), dtype=torch.float64))
                if pieces:
                    row = backward_row(loaded, batch, CarryOptions(3), objective=objective, factors=part.factors)
                else:
                    row = WholeRows(loaded).backward(batch, part)
                sums = {name: float(value) + sums.get(name, 0.0) for name, value in row.sums.items()}
            means = step_means(sums)
            assert {name: means[name] for name in means if name.startswith("sampler_kl")} == pytest.approx(expected)


def test_without_probabilities_of_the_sampler_there_is_no_divergence(tmp_path: Path) -> None:
    trajectories = as_trajectories(rollouts(), without=["sampling_logprobs"])
    batch = PackedDataset(write_rows(tmp_path / "packed", trajectories, [0] * 10), terms=True)[0]
    part = LossPart(choose_objective("ppo"), torch.ones(10, dtype=torch.float64))
    sums = WholeRows(packed_model("qwen3")).loss(batch, part).sums
    assert not [name for name in step_means({name: float(each) for name, each in sums.items()}) if "sampler" in name]

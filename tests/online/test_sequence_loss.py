"""Policy losses of sequences in memory equal those of packed rows, and micro-batches add up to the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.packed_objectives import opened, packed_model, rollouts
from treepack.errors import TreepackError
from treepack.model.forward import WholeRows
from treepack.objectives.denominators import step_factors, trajectory_table
from treepack.objectives.losses import step_means
from treepack.objectives.objective import choose_objective
from treepack.objectives.row_numbers import LossPart
from treepack.online import batch_statistics, plan_batch, sequence_loss


def padded(name: str) -> Tensor:
    values = [getattr(one, name) for one in rollouts()]
    width = max(map(len, values))
    return torch.tensor([[*each, *[0.0] * (width - len(each))] for each in values], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dapo", {"kl": 0.1, "entropy": 0.1}),
        ("gspo", {"importance_cap": 1.2, "importance_level": "sequence"}),
        ("dr_grpo", {"response_length": 7, "sequence_mask": 0.1}),
    ],
)
def test_the_loss_is_that_of_packed_rows_and_micro_batches_add_up(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    objective, loaded = choose_objective(name, **options), packed_model("qwen3")
    scored = padded("weights") > 0
    ids = padded("tokens").long()
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(one.tokens)] for one in rollouts()])
    logprobs, entropies = batch_statistics(loaded.model, plan_batch(ids, mask, scored))
    columns = {f"{each}_logprobs": padded(each) for each in ("old", "ref", "sampling")}
    columns["advantages"] = padded("advantages")
    whole, sums = sequence_loss(logprobs, entropies, scored, objective, **columns)
    totals = {"step_tokens": float(scored.sum()), "step_sequences": float(len(scored))}
    parts = 0.0
    for part in (slice(0, 3), slice(3, None)):
        own = {column: values[part] for column, values in columns.items()}
        loss, _ = sequence_loss(logprobs[part], entropies[part], scored[part], objective, **own, **totals)
        parts += loss.item()
    assert parts == pytest.approx(whole.item(), rel=1e-12)
    # The same as rows, whose trajectories and spans have the weight 1.
    plain = [
        one.__class__(**{**vars(one), "weight": 1.0, "weights": [float(w > 0) for w in one.weights]})
        for one in rollouts()
    ]
    dataset = opened(tmp_path / "packed", plain, [0] * len(plain))
    (factors,) = step_factors(trajectory_table(dataset, objective), [0], objective)
    row = WholeRows(loaded).loss(dataset[0], LossPart(objective, torch.from_numpy(factors)))
    assert whole.item() == pytest.approx(row.loss.item(), rel=1e-9)
    ours, theirs = (step_means({k: float(v) for k, v in each.items()}) for each in (sums, row.sums))
    assert ours == pytest.approx(theirs, rel=1e-9)
    assert np.isfinite(list(ours.values())).all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"kl": 0.1}, "the loss grpo with these options needs ref_logprobs"),
        ("grpo", {"entropy": 0.1}, "needs entropies"),
        ("dpo", {}, "the loss is dpo with the denominator token; expected a policy loss without values"),
        ("grpo", {"denominator": "group"}, "the loss is grpo with the denominator group"),
    ],
)
def test_what_is_missing_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    values, objective = torch.zeros(1, 2), choose_objective(name, **options)
    with pytest.raises(TreepackError, match=message):
        sequence_loss(values, None, torch.ones(1, 2).bool(), objective, advantages=torch.ones(1))

"""Collated rows have the same losses and gradients as the rows alone, with or without a wrapper around the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from support.oracle_model import Sample, alone, gradients, make_row, sample_sets, tiny_model, worst_error, write_rows
from support.refusal import refusal
from support.strategies import make
from treepack.attention import register
from treepack.data.batch import empty_batch, make_batch
from treepack.data.dataset import PackedDataset
from treepack.errors import TreepackError
from treepack.model.collation import batch_logprobs, batch_loss, collate
from treepack.objectives.losses import objective_loss
from treepack.objectives.objective import choose_objective

# 1 - 2 - 3 - 4 - 5 and 1 - 2 - 6 share two tokens; 7 - 8 is a second tree in the same row
SAMPLES = [
    Sample((1, 2, 3, 4, 5), (0.0, 1.0, 0.0, 2.0, 1.0)),
    Sample((1, 2, 6), (0.0, 1.0, 1.0)),
    Sample((7, 8), (0.0, 0.5)),
]


def tree_model(kind: str = "qwen3") -> Any:
    register()
    return tiny_model(kind, attention="treepack_reference")


class Wrapper(torch.nn.Module):
    """A wrapper like the ones of trainers: it passes all arguments on and has no attribute of the model."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Any) -> Any:
        return self.module(**inputs)


def test_one_row_keeps_its_values_and_gets_a_batch_dimension() -> None:
    row = make_batch(make_row(SAMPLES))
    inputs = collate([row])
    assert inputs.pop("row_id").tolist() == [row.row_id]
    assert inputs.pop("trajectory_ids") == [row.trajectory_ids]
    assert set(inputs) == {"input_ids", "position_ids", "subtree_end", "parent", "scale", "loss_weight"}
    for name, values in inputs.items():
        assert values.dtype == getattr(row, name).dtype
        assert torch.equal(values, getattr(row, name)[None])


def test_shorter_rows_are_padded_as_rows_are() -> None:
    long, short = make_row(SAMPLES), make_row(SAMPLES[2:], row_id=1)
    inputs = collate([make_batch(long), make_batch(short)])
    padded = make_batch(short, multiple=len(long.input_ids))
    for name in ("input_ids", "position_ids", "subtree_end", "parent", "scale", "loss_weight"):
        assert torch.equal(inputs[name][1], getattr(padded, name))
    assert inputs["subtree_end"].shape == (2, 8)  # 5 + 1 + 2 different tokens


@settings(max_examples=12)
@given(first=sample_sets(), second=sample_sets())
def test_the_loss_of_a_batch_is_that_of_every_trajectory_alone(first: list[Sample], second: list[Sample]) -> None:
    expected, of_each = alone(tiny_model("qwen3"), [*first, *second])
    model = tree_model()
    # A row of padding in between shifts the indices of the second row.
    rows = [make_batch(make_row(first)), empty_batch(3), make_batch(make_row(second))]
    loss = batch_loss(Wrapper(model), collate(rows), chunk=5)
    torch.autograd.backward(loss)
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-9, abs=1e-12)
    assert worst_error(gradients(model), of_each) < 1e-9


def test_a_batch_of_padding_gives_every_parameter_a_gradient_of_zero() -> None:
    model = tree_model("gpt_neox")
    torch.autograd.backward(batch_loss(model, collate([empty_batch(4)])))
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_terms_of_several_rows_give_the_sum_of_their_objectives(tmp_path: Path) -> None:
    trajectories = [
        make("a", [1, 2, 3, 4], advantage=0.5, old_logprobs=[-1.0, -2.0, -3.0], group="x"),
        make("b", [1, 2, 5], advantage=-1.0, old_logprobs=[-3.0, -4.0], group="y"),
        make("c", [9, 8], advantage=2.0, old_logprobs=[-2.0], group="x"),
    ]
    dataset = PackedDataset(write_rows(tmp_path / "packed", trajectories, [0, 0, 1]), terms=True)
    objective, model = choose_objective("gspo"), tree_model()
    factors = torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64)

    def loss_of(rows: list[Any], row_factors: torch.Tensor) -> torch.Tensor:
        inputs = collate(rows)
        return objective_loss(*batch_logprobs(model, inputs), inputs["terms"], row_factors, objective)[0]

    model.zero_grad()
    separate = [loss_of([dataset[0]], factors[:2]), loss_of([dataset[1]], factors[2:])]
    torch.autograd.backward(separate)
    expected = gradients(model)
    model.zero_grad()
    without_terms = empty_batch(2)
    together = loss_of([dataset[0], without_terms, empty_batch(9, terms=True), dataset[1]], factors)
    torch.autograd.backward(together)
    assert float(together.detach()) == pytest.approx(sum(float(each.detach()) for each in separate), rel=1e-12)
    assert worst_error(gradients(model), expected) < 1e-9


def test_a_term_column_that_a_row_lacks_is_left_out(tmp_path: Path) -> None:
    trajectories = [make(name, [1, 2, 3], advantage=1.0, group=name) for name in "ab"]
    dataset = PackedDataset(write_rows(tmp_path / "packed", trajectories, [0, 1]), terms=True)
    first, second = dataset[0], dataset[1]
    assert first.terms is not None
    terms = collate([first, second])["terms"]
    assert terms.group.tolist() == [0, 1]  # group 0 of each row: the second is shifted by the one trajectory before it
    assert terms.advantage.tolist() == [1.0] * 4
    assert terms.old_logprob is None
    lacking = replace(first, terms=replace(first.terms, advantage=None))
    assert collate([lacking, second])["terms"].advantage is None


def test_terms_that_are_missing_are_one_sentence_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(TreepackError, match=r"has no terms; .*terms=True.*`treepack advantages`, or trajectories_from"):
        batch_logprobs(tree_model(), collate([make_batch(make_row(SAMPLES))]))
    packed = write_rows(tmp_path / "packed", [make("a", [1, 2, 3], old_logprobs=[-1.0, -2.0])], [0])
    inputs = collate([PackedDataset(packed, terms=True)[0]])
    values = batch_logprobs(tree_model(), inputs)
    for name, column in (("dapo", "term_advantage"), ("dpo", "term_ref_logprob")):
        with pytest.raises(TreepackError, match=f"the rows have no {column}, which the loss .* needs; .* `treepack"):
            objective_loss(*values, inputs["terms"], torch.ones(1).double(), choose_objective(name))


def test_models_that_would_give_wrong_gradients_are_refused() -> None:
    inputs = collate([make_batch(make_row(SAMPLES))])
    assert "uses the attention 'sdpa', which ignores subtree_end" in refusal(
        batch_loss, Wrapper(tiny_model("qwen3")), inputs
    )
    assert "no causal language model" in refusal(batch_loss, torch.nn.Linear(2, 2), inputs)
    model = tree_model()
    model.set_output_embeddings(torch.nn.Sequential(model.get_output_embeddings()))
    with pytest.raises(TreepackError, match=r"its output layer is a .*Sequential; expected a plain torch.nn.Linear"):
        batch_loss(model, inputs)
    assert "no row" in refusal(collate, [])

"""`verify_gradients`, `backward_row` and `RowsInPieces` run packed directories in pieces, exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.command_line import Run as Command
from support.oracle_model import gradients, packed_directory, tiny_config, worst_error, write_rows
from support.packed_objectives import as_trajectories, packed_model, rollouts
from support.paths import ROOT
from support.strategies import make
from treepack import row_loss
from treepack.carry.backward import CarryOptions, RowsInPieces, backward_row
from treepack.carry.verify import in_pieces
from treepack.data.dataset import PackedDataset
from treepack.errors import TreepackError
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.forward import row_logprobs
from treepack.model.loaded import LoadedModel
from treepack.model.verify.gradients import verify_gradients
from treepack.objectives.objective import choose_objective
from treepack.objectives.row_numbers import LossPart
from treepack.train.options import TrainOptions
from treepack.train.setup.opening import open_verification
from treepack.trajectory import Trajectory

CPU = TrainOptions(device="cpu")
BY_GROUP = [i % 2 for i in range(10)]  # the row of each of ten rollouts; a row has several trees and duplicates


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tiny_config(tmp_path / "tiny.json")


# Of tokens, of means of trajectories, and of pairs; test_carried_gradients has all objectives.
@pytest.mark.parametrize(("name", "limit"), [("sft", 1), ("gspo", 7), ("dpo", 7)])
def test_verification_in_pieces_passes_for_every_kind_of_objective(
    tmp_path: Path, config: Path, name: str, limit: int
) -> None:
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts()), BY_GROUP)
    run = open_verification(packed, config, replace(CPU, objective=choose_objective(name)))
    rows = run.trainable_rows
    batches = [run.dataset[row] for row in rows]
    arguments: dict[str, Any] = {"objective": run.options.objective, "factors": run.factors(rows)}
    report = verify_gradients(run.loaded, batches, backward=in_pieces(limit), **arguments)
    assert (report.passed, report.dtype) == (True, "float64")
    assert report.worst[1] < 1e-10


def test_verification_in_pieces_fails_on_a_wrong_mask(tmp_path: Path, config: Path) -> None:
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts()), BY_GROUP)
    run = open_verification(packed, config, CPU)
    # Every token sees all tokens before it, also on other branches.
    wrong = [replace(row, subtree_end=torch.full_like(row.subtree_end, row.num_tokens)) for row in run.dataset]
    assert not verify_gradients(run.loaded, wrong, backward=in_pieces(7)).passed


def long_rollouts() -> list[Trajectory]:
    """Four rollouts of two groups with a common start of 300 tokens, and one that repeats the first one."""
    generator = np.random.default_rng(0)
    start = generator.integers(0, 50, 300).tolist()
    ends = [generator.integers(0, 50, size).tolist() for size in (300, 250, 5, 200)]
    sequences = [start + end for end in [*ends, ends[0]]]
    return [make(f"t{i}", tokens, spans=[(290, len(tokens), 1.0)]) for i, tokens in enumerate(sequences)]


@pytest.mark.parametrize("limit", [128, 1000])
def test_long_rows_are_verified_in_pieces(tmp_path: Path, config: Path, limit: int) -> None:
    packed = packed_directory(tmp_path / "packed", long_rollouts(), capacity=4096)
    run = open_verification(packed, config, CPU)
    (batch,) = run.dataset
    assert batch.num_tokens > limit
    report = verify_gradients(run.loaded, [batch], backward=in_pieces(limit))
    assert report.passed
    assert report.worst[1] < 1e-10


def test_adapters_are_exact_in_pieces(tmp_path: Path, config: Path) -> None:
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts()), BY_GROUP)
    run = open_verification(packed, config, replace(CPU, lora=LoraOptions(rank=3)))
    report = verify_gradients(run.loaded, list(run.dataset), backward=in_pieces(3))
    assert (report.passed, report.dtype) == (True, "float64")
    assert all("lora_" in name for name in report.errors)


@pytest.mark.parametrize("limit", [5, 1000])
def test_a_row_in_pieces_has_the_loss_and_gradients_of_the_whole_row(tmp_path: Path, limit: int) -> None:
    loaded = packed_model("qwen3")
    (batch,) = PackedDataset(write_rows(tmp_path / "packed", as_trajectories(rollouts()), [0] * 10))
    expected = row_loss(loaded, batch) / batch.total_weight
    whole = gradients_after(loaded, lambda: torch.autograd.backward(expected))
    result: list[Any] = []
    options = CarryOptions(limit)
    pieces = gradients_after(
        loaded, lambda: result.append(backward_row(loaded, batch, options, denominator=batch.total_weight))
    )
    assert worst_error(pieces, whole) < 1e-12
    assert result[0].loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert result[0].tokens_backward == batch.num_tokens
    assert (result[0].tokens_forward > batch.num_tokens) is (limit < batch.num_tokens)
    value = RowsInPieces(loaded, options).loss(batch, LossPart(denominator=batch.total_weight))
    assert value.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert (value.tokens_forward, value.tokens_backward) == (batch.num_tokens, 0)


def gradients_after(loaded: LoadedModel, run: Callable[[], Any]) -> dict[str, torch.Tensor]:
    loaded.model.zero_grad()
    run()
    return gradients(loaded.model)


def test_log_probabilities_in_pieces_are_those_of_the_whole_row(tmp_path: Path) -> None:
    loaded = packed_model("qwen3")
    (batch,) = PackedDataset(write_rows(tmp_path / "packed", as_trajectories(rollouts()), [0] * 10))
    # In any order, and one of them twice.
    tokens = (batch.parent >= 0).nonzero().squeeze(-1).flip(0)[[0, *range(8), 3]]
    temperature = torch.linspace(0.5, 2.0, len(tokens), dtype=torch.float64)
    with torch.no_grad():
        whole = row_logprobs(loaded, batch, tokens, temperature=temperature)
    pieces = RowsInPieces(loaded, CarryOptions(3)).scores(batch, tokens, temperature=temperature)
    for values, expected in zip(pieces[:2], whole, strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


def test_a_row_in_pieces_within_autocast_is_refused(tmp_path: Path) -> None:
    loaded = packed_model("qwen3")
    (batch,) = PackedDataset(write_rows(tmp_path / "packed", as_trajectories(rollouts()), [0] * 10))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TreepackError, match=r"runs inside torch\.autocast, which would"),
    ):
        backward_row(loaded, batch, CarryOptions(5))


def test_models_that_cannot_be_cut_are_refused_by_name(tmp_path: Path) -> None:
    loaded = replace(packed_model("qwen3"), attention="flash")
    (batch,) = PackedDataset(write_rows(tmp_path / "packed", as_trajectories(rollouts()), [0] * 10))
    runner = RowsInPieces(loaded, CarryOptions(5))
    for run in (runner.backward, runner.loss):
        with pytest.raises(TreepackError, match=r"^qwen3: --carry cannot cut its rows into pieces, because flash"):
            run(batch)


def test_arguments_without_meaning_are_refused(tmp_path: Path) -> None:
    loaded = packed_model("qwen3")
    (batch,) = PackedDataset(write_rows(tmp_path / "packed", as_trajectories(rollouts()), [0] * 10))
    size: Any
    for size in (0, -1, "auto", None):
        with pytest.raises(TreepackError, match=r"^limit is .*; expected a number of tokens of at least 1"):
            CarryOptions(size)
    with pytest.raises(TreepackError, match="factors of the loss gspo are missing; pass the factors of step_factors"):
        backward_row(loaded, batch, CarryOptions(5), objective=choose_objective("gspo"))
    with pytest.raises(TreepackError, match="factors of the loss sft have no use; pass none"):
        LossPart(factors=torch.ones(10))


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "size", "method"), [("gspo", 128, "auto"), ("dpo", 1000, "groups")])
def test_the_sample_data_is_exact_in_pieces(
    treepack: Command, tmp_path: Path, loss: str, size: int, method: str
) -> None:
    trie, advantages, packed = (tmp_path / name for name in ("trie", "advantages", "packed"))
    assert treepack("build-trie", ROOT / "sample_data" / "tokens.jsonl", "--out", trie).status == 0
    assert treepack("advantages", trie, "--out", advantages, "--estimator", "grpo").status == 0
    assert treepack("pack", advantages, "--capacity", 4096, "--method", method, "--out", packed).status == 0
    model = ("--model", ROOT / "sample_data" / "tiny-qwen3.json", "--device", "cpu")
    if loss == "dpo":
        arguments = ("--column", "ref", "--carry", size, "--out", tmp_path / "scored")
        assert treepack("logprobs", packed, *model, *arguments).status == 0
        packed = tmp_path / "scored"
    done = treepack("train", packed, *model, "--verify", "--verify-rows", 1, "--carry", size, "--loss", loss)
    assert done.status == 0
    assert "attention               reference in float64" in done.out
    assert f"of at most {size:,} tokens, in 1 of 1 rows" in done.out

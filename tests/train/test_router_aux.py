"""The load-balancing loss of routers: trees against the trajectories one by one; and the costs of a mixture."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from support.command_line import Run
from support.oracle_model import Sample, gradients, make_row, packed_directory, tiny_config, worst_error
from support.oracle_objectives import step_loss
from support.packed_objectives import opened, rollouts
from support.rank_processes import CPU, Case, train_over
from support.strategies import make
from support.tiny_families import KeepFloat64, tiny_family
from treepack.attention import IMPLEMENTATIONS, register
from treepack.carry.backward import CarryOptions, RowsInPieces
from treepack.costs.model_cost import shape_of
from treepack.data.batch import make_batch
from treepack.model.experts.router_balance import RouterBalance
from treepack.model.forward import WholeRows, hidden_states, row_loss
from treepack.model.layers import find_layers
from treepack.model.loaded import LoadedModel
from treepack.objectives.denominators import step_factors, trajectory_table
from treepack.objectives.objective import choose_objective
from treepack.objectives.row_numbers import LossPart
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.setup.opening import open_run, open_verification
from treepack.trajectory import Trajectory

COEFFICIENT = 0.3
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SAMPLES = [
    Sample(tokens, (0.0, *[1.0] * (len(tokens) - 1)))
    for tokens in [
        (*range(9), 21, 22, 23),
        (*range(9), 31, 32),
        (*range(5), 41, 42, 43, 44),
        (7, 8, 9, 10),
        (7, 8, 9, 11, 12, 13, 14, 15),
    ]
]


def flat(model: Any, samples: list[Sample]) -> tuple[Tensor, Tensor, Any]:
    """Return the nll of `samples` alone, the loss of the routers over all of them, and their logits by layer."""
    total, routed = torch.zeros((), dtype=torch.float64), []
    for sample in samples:
        tokens = torch.tensor(sample.tokens)
        out = model(input_ids=tokens[None], use_cache=False, output_router_logits=True)
        nll = cross_entropy(out.logits[0, :-1], tokens[1:], reduction="none")
        total = total + (nll.double() * torch.tensor(sample.weights[1:], dtype=torch.float64)).sum()
        routed.append(out.router_logits)
    layers = tuple(torch.cat(each) for each in zip(*routed, strict=True))
    p = torch.cat(layers).double().softmax(-1)
    chosen = torch.zeros_like(p).scatter_(1, p.topk(2, -1).indices, 1.0)
    return total, p.shape[1] * (chosen.mean(0) * p.mean(0)).sum(), layers


def in_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` under `KeepFloat64`, which torch leaves for the whole backward pass."""

    def kept(*args: Any, **kwargs: Any) -> Any:
        with KeepFloat64():
            return forward(*args, **kwargs)

    return kept


@pytest.mark.parametrize(("kind", "recompute"), [("qwen3_moe", False), ("qwen3_moe", True), ("mixtral", False)])
def test_rows_of_trees_give_the_gradients_of_the_trajectories_one_by_one(kind: str, recompute: bool) -> None:
    register()
    model = tiny_family(kind)
    denominator = sum(sum(sample.weights) for sample in SAMPLES)
    with KeepFloat64():
        nll, auxiliary, layers = flat(model, SAMPLES)
        torch.autograd.backward(nll / denominator + COEFFICIENT * auxiliary)
        expected = gradients(model)
        # transformers counts in float32
        theirs = float(torch.as_tensor(load_balancing_loss_func(layers, layers[0].shape[1], 2)).detach())
        assert theirs == pytest.approx(float(auxiliary.detach()), rel=1e-6)
        model.zero_grad()
        model.set_attn_implementation(IMPLEMENTATIONS["reference"])
        for layer in find_layers(model) if recompute else []:
            layer.forward = functools.partial(checkpoint, in_float64(layer.forward), use_reentrant=False)
        loaded = LoadedModel(model, kind, "reference", ())
        # The second row is padded, to 16 tokens; padding must not count.
        rows = [make_batch(make_row(SAMPLES[:2])), make_batch(make_row(SAMPLES[2:]), multiple=16)]
        balance = RouterBalance(model, COEFFICIENT, source=kind)
        for row in rows:
            with torch.no_grad(), balance.counting(row.scale):
                hidden_states(loaded, row)
        assert balance.finish(balance.sums()) == pytest.approx(float(auxiliary.detach()), rel=1e-12)
        for row in rows:
            with balance.attached(row.scale):
                torch.autograd.backward(row_loss(loaded, row) / denominator)
        assert worst_error(gradients(model), expected) <= 1e-9
        model.zero_grad()
        for row in rows:
            torch.autograd.backward(row_loss(loaded, row) / denominator)
        assert worst_error(gradients(model), expected) > 1e-3, "outside the block nothing is added"


@pytest.mark.parametrize(("name", "kind", "limit"), [("grpo", "qwen3_moe", None), ("gspo", "mixtral", 3)])
def test_policy_losses_add_it_whole_and_in_pieces(tmp_path: Path, name: str, kind: str, limit: int | None) -> None:
    register()
    model, samples, objective = tiny_family(kind), rollouts(), choose_objective(name)
    dataset = opened(tmp_path / "packed", samples, [i % 3 for i in range(len(samples))])
    with KeepFloat64():
        loss = step_loss(model, samples, objective)
        _, auxiliary, _ = flat(model, [Sample(tuple(one.tokens), tuple(one.weights)) for one in samples])
        torch.autograd.backward(loss + COEFFICIENT * auxiliary)
        expected = gradients(model)
        model.zero_grad()
        model.set_attn_implementation(IMPLEMENTATIONS["reference"])
        loaded = LoadedModel(model, kind, "reference", ())
        runner = WholeRows(loaded) if limit is None else RowsInPieces(loaded, CarryOptions(limit))
        balance = RouterBalance(model, COEFFICIENT, source=kind)
        for batch in dataset:
            with balance.counting(batch.scale):
                runner.forward(batch)
        assert balance.finish(balance.sums()) == pytest.approx(float(auxiliary.detach()), rel=1e-12)
        rows = list(range(len(dataset)))
        for row, factors in zip(rows, step_factors(trajectory_table(dataset, objective), rows, objective), strict=True):
            with balance.attached(dataset[row].scale):
                runner.backward(dataset[row], LossPart(objective, torch.from_numpy(factors)))
        assert worst_error(gradients(model), expected) <= 1e-9


def trajectories() -> list[Trajectory]:
    return [
        make(f"t{i}", list(sample.tokens), spans=[(1, len(sample.tokens), 1.0)], group="g")
        for i, sample in enumerate(SAMPLES)
    ]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return packed_directory(tmp_path / "packed", trajectories(), capacity=24)


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    return tiny_config(tmp_path / "config.json", "qwen3", **EXPERTS, model_type="qwen3_moe")


def options(**changes: Any) -> TrainOptions:
    return TrainOptions(device="cpu", attention="reference", lr=0.0, clip=0.0, router_aux=COEFFICIENT, **changes)


def test_a_step_of_a_run_reports_it_and_adds_its_gradient(packed: Path, mixture: Path, tmp_path: Path) -> None:
    run = open_run(packed, mixture, options())
    assert len(run.schedule[0].rows) > 1
    (metrics,) = train(run, tmp_path / "out")
    assert metrics.means["router_aux_seconds"] > 0
    model = run.loaded.model
    model.zero_grad()
    model.set_attn_implementation("sdpa")
    nll, auxiliary, _ = flat(model, SAMPLES)
    mean = nll / metrics.total_weight
    assert metrics.means["router_aux"] == pytest.approx(float(auxiliary.detach()), rel=1e-5)
    assert metrics.loss == pytest.approx(float(mean.detach()), rel=1e-5)
    grads = torch.autograd.grad(mean + COEFFICIENT * auxiliary, list(model.parameters()))
    assert metrics.grad_norm == pytest.approx(float(torch.cat([g.flatten() for g in grads]).norm()), rel=1e-4)


@pytest.mark.slow
def test_two_ranks_balance_as_one_process_does(packed: Path, mixture: Path) -> None:
    changes = {"epochs": 2, "rows_per_step": 3, "router_aux": COEFFICIENT, "checkpoint_layers": "all"}
    gathered = {**changes, "dtype": "bf16", "gather_dtype": "bf16"}
    cases = [
        Case("plain", packed, mixture, changes),
        Case("gathered", packed, mixture, gathered),
        Case("compiled", packed, mixture, {**gathered, "compile": True}),
    ]
    expected, results = train_over(0, packed.parent, cases[:1]), train_over(2, packed.parent, cases)
    # bfloat16 has a relative error of 2**-8 in each of some ten products one after the other
    comparisons = [("plain", expected, 1e-4), ("gathered", expected, 2.0**-5), ("compiled", results, 1e-4)]
    for name, twins, tolerance in comparisons:
        other = "gathered" if name == "compiled" else "plain"
        for record, twin in zip(results[name]["records"], twins[other]["records"], strict=True):
            assert record["router_aux"] == pytest.approx(twin["router_aux"], rel=tolerance)
            assert record["grad_norm"] == pytest.approx(twin["grad_norm"], rel=tolerance)


def test_other_models_refuse_it(packed: Path, tmp_path: Path, treepack: Run) -> None:
    dense = tiny_config(tmp_path / "dense.json")
    result = treepack("train", packed, "--model", dense, "--out", tmp_path / "out", "--router-aux", 0.1)
    assert result.status == 1
    assert "no load-balancing loss for Qwen3ForCausalLM; train it without --router-aux" in result.err


def test_a_note_says_when_it_is_left_out(packed: Path, mixture: Path) -> None:
    def noted(run: Any) -> list[str]:
        return [note for note in run.notes if "load-balancing" in note]

    assert noted(open_run(packed, mixture, CPU)) == [
        "the load-balancing loss of the routers is left out; --router-aux adds it"
    ]
    assert noted(open_run(packed, mixture, options())) == []
    assert noted(open_verification(packed, mixture, options())) == [
        "the gradients are compared without the load-balancing loss of the routers"
    ]


def test_a_row_of_a_mixture_costs_its_active_experts(packed: Path, mixture: Path) -> None:
    run = open_run(packed, mixture, CPU)
    config = run.loaded.causal.config
    shape = shape_of(config.to_dict(), name="mixture")
    exact = 2.0 * (shape.weights * run.dataset.num_tokens + shape.scores * run.dataset.num_pairs)
    # The forecast leaves out the norms, which are few: two of the hidden size and two of the head size a layer.
    norms = config.num_hidden_layers * 2 * (config.hidden_size + config.head_dim) + config.hidden_size
    np.testing.assert_allclose(run.costs(), exact + 2.0 * norms * run.dataset.num_tokens)


def test_a_layer_with_a_window_costs_at_most_its_window_for_each_token(packed: Path, tmp_path: Path) -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention"] * 2}
    full, short = (
        open_run(packed, tiny_config(tmp_path / f"{window}.json", "qwen3", **fields), CPU)
        for window, fields in ((0, {}), (3, sliding))
    )
    pairs, tokens = full.dataset.num_pairs, full.dataset.num_tokens
    config = full.loaded.causal.config
    each = 4.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    assert (3 * tokens < pairs).any()
    np.testing.assert_allclose(full.costs() - short.costs(), each * (pairs - np.minimum(pairs, 3 * tokens)))

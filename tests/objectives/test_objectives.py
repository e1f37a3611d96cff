"""Objectives over terms equal the objectives of trajectories run alone, for any packing into rows.

Loss and gradient of every parameter agree in float64 to a relative 1e-9. The trajectories share prefixes, but have
different advantages, masks, weights and old log-probabilities there. The oracle is `oracle_objectives.step_loss`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.oracle_model import gradients, worst_error, write_rows
from support.oracle_objectives import Rollout, gspo_of_sequences, own_logprobs, step_loss
from support.packed_objectives import COLUMNS, as_trajectories, opened, packed_model, plain, rollouts
from support.refusal import refusal
from treepack.carry.backward import CarryOptions, backward_row
from treepack.data.batch import TermTensors
from treepack.data.dataset import PackedDataset
from treepack.errors import TreepackError
from treepack.model.forward import row_logprobs
from treepack.model.loaded import LoadedModel
from treepack.objectives.denominators import check_columns, step_factors, trajectory_table
from treepack.objectives.losses import objective_loss
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.preferences import preference_pairs
from treepack.objectives.registry import own_losses, presets_of
from treepack.rl.rollout_parts import LOST_PARTS
from treepack.trajectory import Trajectory

TOLERANCE = 1e-9
PRESETS = presets_of(own_losses())


def step_of(
    loaded: LoadedModel, dataset: PackedDataset, objective: Objective, *, chunk: int = 3
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Return loss, gradients and means of one optimiser step over all rows, with a backward pass for each row."""
    check_columns(dataset, objective)
    every = list(range(len(dataset)))[::-1]  # not in file order: the order must not matter
    factors = step_factors(trajectory_table(dataset, objective), every, objective)
    loaded.model.zero_grad()
    total, sums = 0.0, dict[str, float]()
    for row, row_factors in zip(every, factors, strict=True):
        batch = dataset[row]
        assert batch.terms is not None
        logprobs, entropies = row_logprobs(loaded, batch, batch.terms.tokens, chunk=5)
        f = torch.from_numpy(row_factors)
        loss, parts = objective_loss(logprobs, entropies, batch.terms, f, objective, chunk=chunk)
        torch.autograd.backward(loss)
        total += loss.item()
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in parts.items()}
    weight = sums.pop("weight")
    return total, gradients(loaded.model), {name: value / weight for name, value in sums.items()}


def expected_of(model: Any, loss: Tensor) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    torch.autograd.backward(loss)
    return loss.item(), gradients(model)


# Every loss, denominator and estimator at least once. Clip bounds are close enough to 1 that some terms are clipped on
# each side, which the test checks.
CASES: list[dict[str, Any]] = [
    {"name": "ppo"},
    {"name": "ppo", "dual_clip": 1.3, "denominator": "group"},
    {"name": "grpo"},
    {"name": "grpo", "kl": 0.3, "kl_estimator": "k1", "clip_low": 0.1, "clip_high": 0.4},
    {"name": "grpo", "kl": 0.3, "kl_estimator": "k2", "denominator": "group"},
    {"name": "dapo", "kl": 0.3, "kl_estimator": "unbiased"},
    {"name": "dapo", "importance_cap": 1.2, "importance_floor": 0.9},
    {"name": "ppo", "old_logprobs": "sampler", "dual_clip": 1.3},
    {"name": "gspo", "clip_low": 0.03, "clip_high": 0.04, "old_logprobs": "sampler"},
    {"name": "grpo", "kl": 0.3, "entropy": 0.2, "importance_cap": 1.1},
    {"name": "dapo"},
    {"name": "dr_grpo", "response_length": 7},
    {"name": "gspo", "clip_low": 0.03, "clip_high": 0.04},
    {"name": "gspo", "clip_low": 0.03, "clip_high": 0.04, "denominator": "token", "kl": 0.1, "importance_cap": 0.9},
    {"name": "cispo", "clip_low": 0.2, "clip_high": 0.1},
    {"name": "cispo", "clip_low": 0.3, "entropy": 0.1, "denominator": "trajectory"},
    {"name": "dpo", "beta": 0.7},
    {"name": "grpo", "importance_cap": 1.1, "importance_level": "sequence"},
    {"name": "dapo", "importance_cap": 1.0, "importance_level": "geometric", "importance_mask": (0.6, 1.2)},
    {"name": "grpo", "importance_mask": (0.7, 1.3)},
    {
        "name": "gspo",
        "clip_low": 0.03,
        "clip_high": 0.04,
        "importance_level": "sequence",
        "importance_mask": (0.3, 2.0),
    },
    {"name": "ppo", "sequence_mask": 0.1, "entropy": 0.1},
    {"name": "cispo", "clip_low": 0.2, "clip_high": 0.1, "sequence_mask": 0.0, "importance_cap": 1.1},
    {"name": "gmpo", "clip_low": 0.1, "clip_high": 0.1, "kl": 0.1},
    {"name": "luspo", "clip_low": 0.03, "clip_high": 0.04},
    {"name": "dppo_tv", "clip_low": 0.001, "clip_high": 0.001},
    {"name": "dppo_kl", "clip_low": 1e-5, "clip_high": 1e-5, "dual_clip": 1.1},
]
# Losses that clip nothing.
SMOOTH_CASES: list[dict[str, Any]] = [
    {"name": "sapo"},
    {"name": "sapo", "denominator": "token", "importance_cap": 1.1, "kl": 0.1},
    {"name": "sapo", "loss_constants": {"temperature_pos": 1.5, "temperature_neg": 0.7}},
    {"name": "vespo", "loss_constants": {"k_pos": 1.0, "lambda_neg": 0.5}},
    {"name": "vespo", "importance_cap": 1.2, "importance_floor": 0.9},
    {"name": "vespo"},
    {"name": "vespo", "importance_cap": 1.1, "denominator": "group", "entropy": 0.1},
    {"name": "dro", "beta": 0.3},
    {"name": "reinforce", "importance_cap": 1.2, "importance_level": "geometric"},
]


def packings(samples: Sequence[Rollout], objective: Objective) -> list[list[int]]:
    """Return the row of each rollout, for two packings: all rollouts in one row, and several rows.

    The rows of pairs are one per group; without pairs, three rows mix the groups.
    """
    by_group = [["a", "b"].index(rollout.group) for rollout in samples]
    # i * i % 3 % 2 + (i > 6): 10 rollouts -> rows [0, 1, 1, 0, 1, 1, 0, 2, 2, 1]
    mixed = [i * i % 3 % 2 + (i > 6) for i in range(len(samples))]
    return [[0] * len(samples), by_group if objective.loss == "dpo" else mixed]


OF_EACH_RATIO = ("ppo", "gspo", "dpo")  # of tokens, trajectories and pairs


# Architecture and loss meet in the log-probabilities only, so gpt2 has three losses.
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *(("qwen3", case) for case in (*CASES, *SMOOTH_CASES)),
        *(pytest.param("gpt2", case, marks=pytest.mark.slow) for case in CASES if case["name"] in OF_EACH_RATIO),
    ],
    ids=lambda each: "-".join(map(str, each.values())) if isinstance(each, dict) else each,
)
def test_loss_and_gradients_are_those_of_trajectories_alone(tmp_path: Path, kind: str, case: dict[str, Any]) -> None:
    objective = choose_objective(**case)
    samples = rollouts(kind)
    loss, expected = expected_of(plain(kind), step_loss(plain(kind), samples, objective))
    for i, rows in enumerate(packings(samples, objective)):
        dataset = opened(tmp_path / str(i), samples, rows)
        total, grads, means = step_of(packed_model(kind), dataset, objective)
        assert total == pytest.approx(loss, rel=TOLERANCE)
        assert worst_error(grads, expected) <= TOLERANCE
        if case in CASES and objective.loss != "dpo":
            assert 0 < means["clip_fraction_low"] < 1
            assert 0 < means["clip_fraction_high"] < 1
            assert ("kl" in means) == (objective.kl > 0)
        if objective.importance_cap is not None:
            assert 0 < means["truncated"] < 1
        assert ("masked" in means) == (objective.importance_mask is not None or objective.sequence_mask is not None)
        assert 0 < means.get("masked", 0.5) < 1


# The cases above have the other presets on one tree.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in (*OF_EACH_RATIO, "bnpo") else pytest.mark.slow)
        for name in PRESETS
        if name not in ("sft", "value", "opd", "distill")
    ],
)
def test_loss_and_gradients_agree_on_any_tree(tmp_path: Path, name: str) -> None:
    objective = choose_objective(name)
    samples = rollouts(seed=1, count=8)
    loss, expected = expected_of(plain("qwen3"), step_loss(plain("qwen3"), samples, objective))
    for i, rows in enumerate(packings(samples, objective)):
        total, grads, _ = step_of(packed_model("qwen3"), opened(tmp_path / str(i), samples, rows), objective)
        assert total == pytest.approx(loss, rel=TOLERANCE)
        assert worst_error(grads, expected) <= TOLERANCE


def test_the_cases_share_tokens_between_trajectories_that_differ_there(tmp_path: Path) -> None:
    for seed in range(5):
        terms = opened(tmp_path / str(seed), rollouts(seed=seed), [0] * 10)[0].terms
        assert terms is not None
        assert len(terms.index) > 1.5 * len(terms.tokens)
        for column in (terms.advantage, terms.old_logprob):
            assert column is not None
            # (token, value) pairs are all different: no two terms of a token have the same value
            assert len({*zip(terms.index.tolist(), column.tolist(), strict=True)}) == len(terms.index)


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
def test_without_old_logprobs_ratios_are_one_and_gradients_flow(tmp_path: Path, name: str) -> None:
    objective = choose_objective(name)
    samples = rollouts()
    loss, expected = expected_of(plain("qwen3"), step_loss(plain("qwen3"), samples, objective, has_old=False))
    dataset = opened(tmp_path / "packed", samples, [i % 3 for i in range(len(samples))], without=["old_logprobs"])
    total, grads, means = step_of(packed_model("qwen3"), dataset, objective)
    assert total == pytest.approx(loss, rel=TOLERANCE)
    assert worst_error(grads, expected) <= TOLERANCE
    assert (means["ratio"], means["old_kl"]) == (1.0, 0.0)


def test_gspo_of_one_advantage_per_sequence_is_the_sequence_formula(tmp_path: Path) -> None:
    samples = [
        replace(r, weights=[float(w > 0) for w in r.weights], weight=1.0, advantages=[r.advantages[0]] * len(r.tokens))
        for r in rollouts()
    ]
    objective = choose_objective("gspo", clip_low=0.05, clip_high=0.05)
    loss, expected = expected_of(plain("qwen3"), gspo_of_sequences(plain("qwen3"), samples, objective))
    total, grads, _ = step_of(packed_model("qwen3"), opened(tmp_path / "packed", samples, [0] * 10), objective)
    assert total == pytest.approx(loss, rel=TOLERANCE)
    assert worst_error(grads, expected) <= TOLERANCE


def many_terms(num_tokens: int, copies: int) -> TermTensors:
    """Return the terms of `copies` trajectories, each of which trains all of the same tokens."""
    rng = np.random.default_rng(0)
    num = num_tokens * copies

    def values() -> Tensor:
        return torch.from_numpy(rng.normal(size=num))

    return TermTensors(
        tokens=torch.arange(1, num_tokens + 1),
        # 3 tokens, 2 copies: index [0, 1, 2, 0, 1, 2], trajectory [0, 0, 0, 1, 1, 1]
        index=torch.arange(num_tokens, dtype=torch.int32).repeat(copies),
        trajectory=torch.arange(copies, dtype=torch.int32).repeat_interleave(num_tokens),
        weight=torch.ones(num, dtype=torch.float64),
        advantage=values(),
        sampling_logprob=values(),
        old_logprob=values(),
        ref_logprob=values(),
        group=torch.zeros(copies, dtype=torch.int32),
        reward=torch.arange(copies, dtype=torch.float64),
    )


class Created(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the size of the largest tensor that an operation allocates; views of its inputs do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, Tensor)}
        tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        allocated = [x.numel() for x in tensors if x.untyped_storage().data_ptr() not in inputs]
        self.numel = max([self.numel, *allocated])
        return out


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        *((name, 100) for name in PRESETS if name not in ("sft", "value", "opd", "distill")),
        *((name, 10_000) for name in OF_EACH_RATIO),
    ],
)
def test_ten_times_more_terms_than_tokens_make_no_tensor_beyond_a_chunk(name: str, chunk: int) -> None:
    num_tokens, copies = 300, 10
    terms = many_terms(num_tokens, copies)
    objective = choose_objective(name)
    logprobs, entropies = (torch.randn(num_tokens, dtype=torch.float64, requires_grad=True) for _ in range(2))
    factors = torch.ones(copies, dtype=torch.float64)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        # Columns of the terms, and views of them, exist anyway.
        if not any(
            tensor.untyped_storage().data_ptr() == c.untyped_storage().data_ptr()
            for c in vars(terms).values()
            if c is not None
        ):
            saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Created() as created:
        loss, _ = objective_loss(logprobs, entropies, terms, factors, objective, chunk=chunk)
        torch.autograd.backward(loss)
    # The factor 2: a step holds two columns of a chunk as one tensor, such as values and their weights for gspo.
    most = num_tokens * copies if chunk > num_tokens * copies else num_tokens
    assert max(created.numel, *saved) <= 2 * most
    if chunk > num_tokens * copies:
        assert created.numel >= most, "the measurement sees whole columns if they exist"


def test_pairs_are_all_of_a_group_with_different_rewards() -> None:
    # Group 0: rewards 1, 0, 1 and an untrained trajectory with -1. Group 1: one reward is NaN. Group 2: one trajectory.
    group, reward = torch.tensor([0, 0, 0, 1, 1, 2, 0]), torch.tensor([1.0, 0.0, 1.0, 3.0, float("nan"), 9.0, -1.0])
    chosen, rejected = preference_pairs(group, reward, torch.tensor([True] * 6 + [False]))
    assert list(zip(chosen.tolist(), rejected.tolist(), strict=True)) == [(0, 1), (2, 1)]


@pytest.mark.parametrize(
    ("name", "without", "options", "message"),
    [
        (
            "dapo",
            ["advantages"],
            {},
            "has no term_advantage, which the loss dapo needs; compute them with `treepack advantages`",
        ),
        ("ppo", ["ref_logprobs"], {"kl": 0.1}, "has no term_ref_logprob.*treepack logprobs --column ref"),
        ("dpo", ["ref_logprobs"], {}, "has no term_ref_logprob.*treepack logprobs --column ref"),
        ("dpo", ["reward"], {}, "has no trajectory_rewards.*give every rollout a reward"),
        ("gspo", ["sampling_logprobs"], {"importance_cap": 2.0}, "has no term_sampling_logprob.*sampler's"),
        ("ppo", [*COLUMNS, "reward"], {}, "has no term_token, which the loss ppo needs; give the rollouts"),
    ],
)
def test_missing_columns_are_refused(
    tmp_path: Path, name: str, without: list[str], options: dict[str, Any], message: str
) -> None:
    dataset = opened(tmp_path / "packed", rollouts(), [0] * 10, without=without)
    with pytest.raises(TreepackError, match=message):
        check_columns(dataset, choose_objective(name, **options))


@pytest.mark.parametrize("column", ["advantages", "old_logprobs"])
def test_values_that_only_some_trajectories_have_are_refused(tmp_path: Path, column: str) -> None:
    some, others = as_trajectories(rollouts()[:5]), as_trajectories(rollouts(), without=[column])[5:]
    dataset = PackedDataset(write_rows(tmp_path / "packed", [*some, *others], [0] * 5 + [1] * 5), terms=True)
    assert f"row 1 has no term_{column.removesuffix('s')} for some trajectories" in refusal(
        check_columns, dataset, choose_objective("ppo")
    )


def test_dpo_refuses_split_pairs_and_data_without_pairs(tmp_path: Path) -> None:
    objective = choose_objective("dpo")
    split = opened(tmp_path / "split", rollouts(), [0] * 9 + [1])
    assert "rows 0 and 1 share the group b, whose pairs dpo compares within a row" in refusal(
        trajectory_table, split, objective
    )
    equal = [replace(rollout, reward=1.0) for rollout in rollouts()]
    assert "no two trajectories of a group have different rewards" in refusal(
        trajectory_table, opened(tmp_path / "equal", equal, [0] * 9 + [1]), objective
    )


def in_rollouts(samples: Sequence[Rollout]) -> tuple[list[Rollout], list[Trajectory], list[int]]:
    """Rollouts of up to three of the `samples`: these with one reward for each rollout, and the number of each's."""
    number = [0, 1, 0, 1, 2, 1, 2, 3, 4, 5]
    equal = [
        replace(one, reward=float(samples[number.index(n)].reward)) for one, n in zip(samples, number, strict=True)
    ]
    named = [
        replace(item, source=f"made:{n}", rollout_id=f"r{n}" if number.count(n) > 1 else None, rollout_part=i)
        for i, (item, n) in enumerate(zip(as_trajectories(equal), number, strict=True))
    ]
    return equal, named, number


def joined_dpo(model: Any, samples: Sequence[Rollout], number: Sequence[int], beta: float) -> Tensor:
    """DPO of rollouts, each with the log-probabilities of all of its samples."""
    shifts: dict[int, Any] = {}
    for one, n in zip(samples, number, strict=True):
        logprobs, _ = own_logprobs(model, one)
        shifts[n] = shifts.get(n, 0) + sum(logprobs[j] - one.ref[j] for j in one.trained)
    facts = {n: samples[list(number).index(n)] for n in shifts}
    losses = [
        -torch.log(torch.sigmoid(beta * (shifts[a] - shifts[b])))
        for a in facts
        for b in facts
        if facts[a].group == facts[b].group and facts[a].reward > facts[b].reward
    ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize(("seed", "packing"), [(0, 0), (1, 1), (2, 1), (3, 0)])
def test_dpo_compares_rollouts_of_several_trajectories(tmp_path: Path, seed: int, packing: int) -> None:
    objective = choose_objective("dpo", beta=0.7)
    # Groups alternate, and rollouts have samples of one group only.
    samples, named, number = in_rollouts(rollouts(seed=seed))
    expected = expected_of(plain("qwen3"), joined_dpo(plain("qwen3"), samples, number, 0.7))
    rows = packings(samples, objective)[packing]
    dataset = PackedDataset(write_rows(tmp_path / "packed", named, rows), terms=True, multiple=8)
    loaded = packed_model("qwen3")
    total, grads, means = step_of(loaded, dataset, objective)
    assert total == pytest.approx(expected[0], rel=TOLERANCE)
    assert worst_error(grads, expected[1]) <= TOLERANCE
    apart, _, _ = step_of(loaded, opened(tmp_path / "apart", samples, rows), objective)
    assert apart != pytest.approx(total, rel=1e-3)
    # The same with rows in pieces.
    every = list(range(len(dataset)))
    factors = [torch.from_numpy(f) for f in step_factors(trajectory_table(dataset, objective), every, objective)]
    loaded.model.zero_grad()
    carried = sum(
        backward_row(loaded, dataset[i], CarryOptions(7), objective=objective, factors=f).loss.item()
        for i, f in zip(every, factors, strict=True)
    )
    assert carried == pytest.approx(total, rel=TOLERANCE)
    assert worst_error(gradients(loaded.model), expected[1]) <= TOLERANCE
    assert means["margin"] != 0


def test_dpo_refuses_rollouts_that_are_not_whole(tmp_path: Path) -> None:
    objective = choose_objective("dpo")
    _, named, number = in_rollouts(rollouts())
    first = number.index(1, 2)  # the second trajectory of rollout 1

    def table(name: str, changed: list[Trajectory], counts: dict[str, int] | None = None) -> Any:
        dataset = PackedDataset(write_rows(tmp_path / name, changed, [0] * 10), terms=True)
        dataset.manifest["counts"].update(counts or {})
        return trajectory_table(dataset, objective)

    assert table("whole", named).pairs is not None
    shared = [replace(item, rollout_part=-1) if i == first else item for i, item in enumerate(named)]
    assert "row 0 has turns that several paths of a search tree share, and dpo" in refusal(table, "shared", shared)
    other = [replace(item, reward=9.0) if i == first else item for i, item in enumerate(named)]
    assert "trajectories of one rollout with different rewards" in refusal(table, "other", other)
    assert "pack has dropped trajectories of 2 rollouts of several" in refusal(table, "lost", named, {LOST_PARTS: 2})


def test_weights_that_were_normalised_are_not_normalised_again(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "packed", as_trajectories(rollouts()), [0] * 10, normalize="trajectory")
    check_columns(PackedDataset(path), choose_objective("ppo"))
    assert "packed with --normalize trajectory" in refusal(check_columns, PackedDataset(path), choose_objective("grpo"))

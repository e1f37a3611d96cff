"""The denominator edge: TreeRPO's objective, each edge of the tree once, for rows of every capacity."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import oracle_rl as oracle
from support.command_line import Run
from support.critic_values import value_after
from support.oracle_model import gradients, tiny_config, worst_error
from support.packed_objectives import packed_model, plain
from support.refusal import refusal
from support.strategies import make, trajectories
from support.trie_files import saved
from treepack.data.batch import make_batch
from treepack.data.dataset import PackedDataset
from treepack.errors import TreepackError
from treepack.model.forward import WholeRows
from treepack.objectives.denominators import check_columns, step_factors, trajectory_table
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.row_factors import row_factors
from treepack.objectives.row_numbers import LossPart
from treepack.pack.directory import pack_trie
from treepack.pack.files import read_rows
from treepack.pack.options import PackOptions
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.rl.advantages.advantage_options import AdvantageOptions
from treepack.rl.advantages.estimate import estimate_advantages, with_advantages
from treepack.trajectory import Tokens, Trajectory, positions
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie, trajectories_of

TREERPO = AdvantageOptions("treerpo", segment="recorded", edges=True)


def content_of(item: Trajectory) -> Tokens:
    assert isinstance(item.content, Tokens)
    return item.content


def trained_of(item: Trajectory) -> list[int]:
    content = content_of(item)
    result: list[int] = positions(content.starts, content.ends).tolist()
    return result


def with_logprobs(item: Trajectory) -> Trajectory:
    """The trajectory with old and reference log-probabilities that depend on the prefix only."""
    tokens = content_of(item).tokens.tolist()
    at = [value_after(tokens[: p + 1]) for p in trained_of(item)]
    columns: dict[str, Any] = {
        "old_logprob": np.array([-1.5 + value for value in at], np.float32),
        "ref_logprob": np.array([-1.5 - value for value in at], np.float32),
    }
    return replace(item, content=replace(content_of(item), **columns))


@st.composite
def forests(draw: st.DrawFn, *, weighted: bool = False) -> Trie:
    """Rewarded trajectories with recorded segments; x0 and x1 always have different rewards."""
    made = draw(trajectories(max_count=6, max_length=7))
    step = made[0].step
    made += [
        make("x0", [0, 1, 1, 2], group="x", step=step, reward=0.0),
        make("x1", [0, 1, 2, 1], group="x", step=step, reward=1.0),
    ]
    members = []
    for item in made:
        content = content_of(item)
        offsets = draw(st.sets(st.integers(1, len(content.tokens) - 1), min_size=1))
        if not weighted:
            item = replace(item, weight=1.0, content=replace(content, span_weights=np.ones(len(content.starts))))
        reward = item.reward if item.group_id == "x" else draw(st.sampled_from([0.0, 0.5, 1.0]))
        members.append(with_logprobs(replace(item, reward=reward, metadata={"segments": sorted(offsets)})))
    trie = build_trie(members)
    return with_advantages(trie, estimate_advantages(trie, TREERPO))


def as_rollouts(items: list[Trajectory]) -> list[oracle.Rollout]:
    return [
        oracle.Rollout(
            content_of(item).tokens.tolist(),
            item.metadata["segments"],
            str(item.group_id),
            item.step or 0,
            float(item.reward or 0),
        )
        for item in items
    ]


@given(forests(weighted=True))
def test_the_terms_of_each_edge_have_a_total_weight_of_1(trie: Trie) -> None:
    items = list(trajectories_of(trie))
    weights = []
    for item in items:
        content = content_of(item)
        of_spans = np.repeat(content.span_weights, content.ends - content.starts)
        weights.append(dict(zip(trained_of(item), item.weight * of_spans, strict=True)))
    expected = [dict.fromkeys(own, 0.0) for own in weights]
    for edge in oracle.edges(as_rollouts(items), [trained_of(item) for item in items]):
        total = sum(weights[i][p] for i, p in edge)
        for i, p in edge:
            expected[i][p] = 1 / total if total else 0.0
    for item, own in zip(items, expected, strict=True):
        factors: Any = content_of(item).edge_factor
        np.testing.assert_allclose(factors, np.array([*own.values()]), rtol=1e-12)


def walked_loss(items: list[Trajectory], objective: Objective) -> Tensor:
    """TRACE, equation 47: a mean over edges of the mean over the tokens of each edge, every token once."""
    model = plain("qwen3")
    logs = []
    for item in items:
        tokens = torch.from_numpy(content_of(item).tokens.astype(np.int64))
        logs.append(model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)[:-1])
    losses = []
    for edge in oracle.edges(as_rollouts(items), [trained_of(item) for item in items]):
        # An edge is one sequence, so a position is one token; any trajectory through it will do.
        of_tokens = []
        for p, i in {p: i for i, p in edge}.items():
            content, n = content_of(items[i]), trained_of(items[i]).index(p)
            columns = (content.advantage, content.old_logprob, content.ref_logprob)
            assert all(column is not None for column in columns)
            advantage, old, ref = (float(column[n]) for column in columns)  # type: ignore[index]
            logp = logs[i][p - 1, int(content.tokens[p])]
            ratio = torch.exp(logp - old)
            clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
            surrogate = torch.minimum(ratio * advantage, clipped * advantage)
            of_tokens.append(-surrogate + objective.kl * (torch.exp(ref - logp) - 1 - (ref - logp)))
        losses.append(torch.stack(of_tokens).mean())
    return torch.stack(losses).mean()


def train_all(trie: Trie) -> bool:
    """True if trajectories that share a token all train it, as a sampler's do: then each token counts once."""
    seen: dict[tuple[int, ...], set[bool]] = defaultdict(set)
    for item in trajectories_of(trie):
        tokens, trained = content_of(item).tokens.tolist(), set(trained_of(item))
        for p in range(1, len(tokens)):
            seen[item.step or 0, *tokens[: p + 1]].add(p in trained)
    return all(len(each) == 1 for each in seen.values())


def packed_loss(rows: list[Row], objective: Objective) -> tuple[float, dict[str, Tensor], float]:
    loaded = packed_model("qwen3")
    loaded.model.zero_grad()
    total = edges = 0.0
    for row, factors in zip(rows, row_factors(rows, objective), strict=True):
        part = LossPart(objective, factors)
        result = WholeRows(loaded, chunk=5).backward(make_batch(row, multiple=8), part)
        total, edges = total + result.loss.item(), edges + result.sums["weight"].item()
    return total, gradients(loaded.model), edges


@settings(max_examples=3)
@given(forests(), st.integers(0, 20))
def test_rows_of_every_capacity_have_the_loss_and_gradient_of_a_walk_over_the_edges(trie: Trie, more: int) -> None:
    if not train_all(trie):
        trie = all_trained(trie)
    objective = choose_objective("grpo", denominator="edge", kl=0.2)
    items = list(trajectories_of(trie))
    model = plain("qwen3")
    model.zero_grad()
    expected = walked_loss(items, objective)
    torch.autograd.backward(expected)
    wanted = gradients(model)
    num_edges = len(oracle.edges(as_rollouts(items), [trained_of(item) for item in items]))
    for capacity in (int(trie.lengths.max()), int(trie.lengths.max()) + more, trie.tokens_tree):
        rows = list(pack_rows(trie, plan_rows(trie, capacity=capacity, method="contiguous")))
        loss, slopes, edges = packed_loss(rows, objective)
        assert loss == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
        assert worst_error(slopes, wanted) <= 1e-9
        assert edges == pytest.approx(num_edges, rel=1e-12)


def all_trained(trie: Trie) -> Trie:
    """The same trajectories, which train everything but their first token."""
    made = []
    for item in trajectories_of(trie):
        tokens = content_of(item).tokens.tolist()
        fields = {"group": str(item.group_id), "step": item.step, "reward": item.reward, "metadata": item.metadata}
        made.append(with_logprobs(make(item.trajectory_id, tokens, **fields)))  # type: ignore[arg-type]
    again = build_trie(made)
    return with_advantages(again, estimate_advantages(again, TREERPO))


def test_files_and_memory_have_the_same_factors_and_unsuitable_data_is_refused(tmp_path: Path) -> None:
    rollouts = [make(f"t{i}", [1, 2, 3 + i % 2, 4, i], reward=float(i % 3), group="g") for i in range(4)]
    trie = build_trie(rollouts)
    options = AdvantageOptions("treerpo", edges=True)
    source = saved(with_advantages(trie, estimate_advantages(trie, options)), tmp_path / "trie")
    objective = choose_objective("grpo", denominator="edge")
    pack_trie(source, tmp_path / "packed", PackOptions(capacity=8))
    dataset = PackedDataset(tmp_path / "packed", terms=True)
    check_columns(dataset, objective)
    table = trajectory_table(dataset, objective)
    factors = step_factors(table, list(range(len(dataset))), objective)
    # Six edges: two at the branch after 1 2, and the four leaves. 1 / 6 of each is 1 in total.
    np.testing.assert_allclose(np.concatenate(factors), 1 / 6, rtol=1e-12)
    in_memory = row_factors(list(read_rows(tmp_path / "packed")), objective)
    assert [each.tolist() for each in in_memory] == [each.tolist() for each in factors]
    assert table.weight.sum() == pytest.approx(6, rel=1e-12)
    pack_trie(source, tmp_path / "once", PackOptions(capacity=8, semantics="once"))
    assert "was packed with --semantics once" in refusal(
        check_columns, PackedDataset(tmp_path / "once", terms=True), objective
    )
    plain_trie = with_advantages(trie, estimate_advantages(trie, replace(options, edges=False)))
    pack_trie(saved(plain_trie, tmp_path / "plain"), tmp_path / "without", PackOptions(capacity=8))
    assert "has no term_edge_factor, which the loss grpo needs; write them with" in refusal(
        check_columns, PackedDataset(tmp_path / "without", terms=True), objective
    )


def test_edges_with_leaf_weights_are_refused(tmp_path: Path, treepack: Run) -> None:
    made = [
        make(f"t{i}", [1, 2, 3 + i], reward=float(i), metadata={"leaf_weight": 0.5, "segments": [1]}) for i in range(2)
    ]
    trie = build_trie(made)
    saved(with_advantages(trie, estimate_advantages(trie, TREERPO)), tmp_path / "credited")
    done = treepack("pack", tmp_path / "credited", "--capacity", 8, "--leaf-weights", "--out", tmp_path / "packed")
    assert done.status == 1
    assert "has factors of edges, which count each edge once, whatever its leaves weigh; leave out --leaf-" in done.err


def test_rejected_groups_that_were_kept_are_refused_with_the_remedy(tmp_path: Path) -> None:
    rewards = {"a": 0.0, "b": 1.0, "c": None, "d": 1.0}
    members = [make(name, [1, 2 + i], group=f"g{i // 2}", reward=r) for i, (name, r) in enumerate(rewards.items())]
    trie = build_trie(members)
    estimates = estimate_advantages(trie, AdvantageOptions("treerpo", edges=True, rejected="zero"))
    source = saved(with_advantages(trie, estimates, rejected="zero"), tmp_path / "trie")
    pack_trie(source, tmp_path / "packed", PackOptions(capacity=8))
    with pytest.raises(TreepackError, match=r"has no term_edge_factor for some trajectories, .*--rejected drop"):
        check_columns(PackedDataset(tmp_path / "packed", terms=True), choose_objective("grpo", denominator="edge"))


def test_the_commands_train_and_verify_with_edges(treepack: Run, tmp_path: Path) -> None:
    trie = build_trie([make(f"t{i}", [1, 2, 3 + i % 2, 4, i], reward=float(i % 3)) for i in range(4)])
    saved(trie, tmp_path / "trie")
    done = treepack("advantages", tmp_path / "trie", *"--estimator treerpo --edges --out".split(), tmp_path / "out")
    assert (done.status, done.notes) == (0, "")
    assert treepack("stats", tmp_path / "out", "--check").status == 0
    assert treepack("pack", tmp_path / "out", "--capacity", 8, "--out", tmp_path / "packed").status == 0
    options = ("--model", tiny_config(tmp_path / "tiny.json"), "--device", "cpu", "--loss", "grpo")
    for more in (["--verify", "--carry", 3], ["--out", tmp_path / "trained"]):
        done = treepack("train", tmp_path / "packed", *options, "--denominator", "edge", *more)
        assert done.status == 0, done.err

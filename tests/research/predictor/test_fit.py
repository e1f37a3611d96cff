"""Packed rows give each prefix its value, loss and gradients as if it were encoded alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.oracle_model import VOCABULARY, gradients, tiny_model, worst_error
from support.oracle_rl import Rollout, paths
from support.packed_objectives import packed_model
from support.refusal import refusal
from support.strategies import make
from treepack.fit import rung
from treepack.model.head.value_head import ValueHead
from treepack.research.predictor.fit import accumulate
from treepack.research.predictor.model import ValueModel, end_states, node_values
from treepack.research.predictor.rows import AnchorRow, NodePrefixes, anchor_prefixes, anchor_rows, draw_nodes
from treepack.research.trace.targets import anchors, binary_rewards, recursive_targets
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie

Prefix = tuple[int, ...]
CAPACITIES = [16, 24, 400]  # many rows that repeat prefixes, some, and one


def samples(*, seed: int = 0, count: int = 14) -> list[Rollout]:
    """Return rollouts of three groups whose turns branch, repeat and are cut at different places."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCABULARY, 2 + group).tolist() for group in range(3)]
    prompts[1][:2] = prompts[0]  # two groups share a prefix of their prompts
    rollouts: list[Rollout] = []
    for i in range(count):
        group = i % 3
        earlier = [one for one in rollouts if one.group == f"g{group}"]
        tokens, cuts = list(prompts[group]), [len(prompts[group])]
        if earlier and i % 4:  # three of four branch from an earlier rollout of their group
            base = earlier[int(rng.integers(len(earlier)))]
            num_turns = int(rng.integers(1, len(base.cuts) + 1))
            cuts = base.cuts[:num_turns]
            tokens = base.tokens[: cuts[-1]]
        for _ in range(int(rng.integers(1, 4))):
            tokens += rng.integers(0, VOCABULARY, int(rng.integers(2, 5))).tolist()
            if len(tokens) < 14 and rng.random() < 0.8:  # sometimes a turn continues, so that cuts differ
                cuts.append(len(tokens))
                tokens += rng.integers(0, VOCABULARY, 1).tolist()
        rollouts.append(Rollout(tokens[:16], [c for c in cuts if c < 15], f"g{group}", -1, float(rng.random() < 0.5)))
    return rollouts


def as_trie(rollouts: Sequence[Rollout], *, share: str = "all") -> Trie:
    """Return the trie of the rollouts; the first token after each cut is trained, so that a turn starts there."""
    made = [
        make(f"t{i}", one.tokens, spans=[(at, at + 1, 1.0) for at in one.cuts], group=one.group, reward=one.reward)
        for i, one in enumerate(rollouts)
    ]
    return build_trie(made, share=share)


def nodes_of(rollouts: Sequence[Rollout]) -> dict[tuple[str, Prefix, tuple[int, ...]], float]:
    """Return the target of every prompt and prefix by group, tokens and cuts: the mean reward of its rollouts."""
    rewards = defaultdict(list)
    for one, path in zip(rollouts, paths(list(rollouts)), strict=True):
        for turn, _ in enumerate(path):
            stop = one.cuts[turn]
            rewards[one.group, tuple(one.tokens[:stop]), tuple(one.cuts[:turn])].append(one.reward)
    return {key: sum(values) / len(values) for key, values in rewards.items()}


def alone(model: Any, head: ValueHead, prefix: Prefix) -> Tensor:
    states = model.base_model(input_ids=torch.tensor(prefix)[None], use_cache=False).last_hidden_state
    value: Tensor = torch.sigmoid(states[0, -1] @ head.weight[0] + head.bias[0])
    return value


def random_head() -> ValueHead:
    head = ValueHead(16, torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, 16)[None])
        head.bias.fill_(0.3)
    return head


def prepare(rollouts: Sequence[Rollout]) -> tuple[Trie, NodePrefixes, np.ndarray[Any, Any]]:
    trie = as_trie(rollouts)
    ends = anchors(trie)
    return trie, anchor_prefixes(trie, ends), recursive_targets(ends.tree, binary_rewards(trie), None)[0]


def tokens_at(row: AnchorRow, at: int) -> Prefix:
    """Return the tokens on the path to a token of a row, by its column `parent`."""
    path = []
    while at >= 0:
        path.append(int(row.row.input_ids[at]))
        at = int(row.row.parent[at])
    return tuple(reversed(path))


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("seed", range(4))
def test_every_prompt_and_prefix_ends_in_one_row_and_no_token_comes_after(capacity: int, seed: int) -> None:
    rollouts = samples(seed=seed)
    _, prefixes, target = prepare(rollouts)
    rows = anchor_rows(prefixes, np.arange(len(prefixes.owner)), capacity=capacity)
    ends = [(int(n), tokens_at(row, int(t))) for row in rows for n, t in zip(row.node, row.token, strict=True)]
    assert sorted(node for node, _ in ends) == list(range(len(prefixes.owner)))
    expected = sorted((prefix, value) for (_, prefix, _), value in nodes_of(rollouts).items())
    shown = sorted((prefix, float(target[node])) for node, prefix in ends)
    assert [prefix for prefix, _ in shown] == [prefix for prefix, _ in expected]
    assert [value for _, value in shown] == pytest.approx([value for _, value in expected])
    assert len(expected) > 10
    for row in rows:
        assert row.row.num_tokens <= capacity
        # A token whose subtree ends right after it is a leaf. Every leaf is an end, so no token comes after an end.
        leaves = np.flatnonzero(row.row.subtree_end == np.arange(row.row.num_tokens) + 1)
        assert set(leaves.tolist()) <= set(row.token.tolist())
    if capacity == CAPACITIES[0]:
        assert len(rows) > 3


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_loss_and_gradients_are_those_of_every_prefix_encoded_alone(kind: str, capacity: int) -> None:
    rollouts = samples()
    _, prefixes, target = prepare(rollouts)
    rows = anchor_rows(prefixes, np.arange(len(prefixes.owner)), capacity=capacity)
    loaded, head = packed_model(kind), random_head()
    loaded.model.zero_grad()
    loss = accumulate(head, rows, target, lambda row: end_states(loaded, row))
    result = gradients(loaded.model) | gradients(head)

    twin, twin_head = tiny_model(kind), random_head()
    expected = [(prefix, value) for (_, prefix, _), value in nodes_of(rollouts).items()]
    errors = torch.stack([(alone(twin, twin_head, prefix) - value).square() for prefix, value in expected])
    torch.autograd.backward(errors.mean())
    assert loss == pytest.approx(float(errors.mean().detach()), rel=1e-12)
    assert worst_error(result, gradients(twin) | gradients(twin_head)) < 1e-9
    assert result["weight"].norm() > 1e-3


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_predictions_are_those_of_every_prefix_alone(capacity: int) -> None:
    rollouts = samples(seed=1)
    _, prefixes, _ = prepare(rollouts)
    size = len(prefixes.owner)
    rows = anchor_rows(prefixes, np.arange(size), capacity=capacity)
    values = node_values(ValueModel(packed_model("qwen3"), random_head()), rows, num_inner=size)
    twin, head = tiny_model("qwen3"), random_head()
    for row in rows:
        for node, at in zip(row.node.tolist(), row.token.tolist(), strict=True):
            assert values[node] == pytest.approx(float(alone(twin, head, tokens_at(row, at)).detach()), abs=1e-12)
    assert np.ptp(values) > 0.1


def test_predictions_in_pieces_are_equal_if_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _, prefixes, _ = prepare(samples(seed=1))
    size = len(prefixes.owner)
    rows = anchor_rows(prefixes, np.arange(size), capacity=CAPACITIES[-1])
    model = ValueModel(packed_model("qwen3"), random_head())
    expected, longest = node_values(model, rows, num_inner=size), max(row.row.num_tokens for row in rows)
    monkeypatch.setattr(rung, "SMALLEST_PIECE", 1)
    monkeypatch.setattr(rung, "smaller_piece", lambda tokens: tokens // 2)
    sizes = list[int]()

    def check(_: Any, __: Any, options: Any) -> None:
        sizes.append(options["input_ids"].numel())
        if sizes[-1] > longest // 2:
            raise torch.OutOfMemoryError

    hook = model.loaded.causal.base_model.register_forward_pre_hook(check, with_kwargs=True)
    values = node_values(model, rows, num_inner=size)
    hook.remove()
    assert max(sizes) == longest
    assert model.loaded.value_head is None
    np.testing.assert_allclose(values, expected, rtol=1e-12)


def test_all_prompts_and_the_given_share_of_prefixes_are_drawn() -> None:
    _, prefixes, _ = prepare(samples(count=40))
    size, groups = len(prefixes.owner), prefixes.num_groups
    assert draw_nodes(prefixes, prefix_share=0, seed=0).tolist() == list(range(groups))
    assert draw_nodes(prefixes, prefix_share=1, seed=0).tolist() == list(range(size))
    quarter = [draw_nodes(prefixes, prefix_share=0.7, seed=seed).tolist() for seed in (0, 0, 1)]
    assert [len(nodes) for nodes in quarter] == [10] * 3  # 7 of 10 are prefixes
    assert all(nodes[:groups] == list(range(groups)) for nodes in quarter)
    assert quarter[0] == quarter[1] != quarter[2]


def test_prefixes_that_several_rollouts_share_are_drawn_before_others() -> None:
    _, prefixes, _ = prepare(samples(count=40))
    groups, passing = prefixes.num_groups, prefixes.num_trajectories
    shared, alone = (
        (groups + np.flatnonzero(where)).tolist() for where in (passing[groups:] > 1, passing[groups:] < 2)
    )
    assert len(shared) > 3
    assert len(alone) > 1
    for wanted in (len(shared) - 2, len(shared) + 1):
        # share / (1 - share) * groups = wanted - 0.5, which `draw_nodes` rounds up to `wanted`
        share = (wanted - 0.5) / (wanted - 0.5 + groups)
        drawn = set(draw_nodes(prefixes, prefix_share=share, seed=0)[groups:].tolist())
        assert len(drawn) == wanted
        assert drawn < set(shared) if wanted < len(shared) else drawn > set(shared)


def test_a_prompt_is_what_the_rollouts_of_a_group_have_in_common_before_their_first_turn() -> None:
    made = [make("a", [1, 2, 3, 9], spans=[(3, 4, 1.0)], reward=1.0), make("b", [1, 2, 8], spans=[(2, 3, 1.0)])]
    trie = build_trie([*made, make("c", [5, 5, 9], spans=[(1, 2, 1.0)], group="h")])
    prefixes = anchor_prefixes(trie, anchors(trie))
    assert dict(zip(["g", "h"], prefixes.num_tokens[:2].tolist(), strict=True)) == {"g": 2, "h": 1}
    apart = build_trie([made[0], make("b", [7, 2, 8], spans=[(2, 3, 1.0)])])
    assert refusal(anchor_prefixes, apart, anchors(apart)).startswith(
        "made:a: the rollouts of group 'g' have no prompt in common, so there"
    )

"""Levels of trees, and scans level by level through flat scans, against the definition token by token."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.attention_trees import chain, ends_of, random_tree, star
from support.flat_scans import flat_scan
from support.refusal import refusal
from support.token_scans import scan_tokens
from treepack.recurrent import levels
from treepack.recurrent.chunks import find_parents, flatten_ends
from treepack.recurrent.levels import build_levels, obstacle_of_fla, scan_by_levels

RULES = ("delta", "kda", "mamba2")


@pytest.fixture(autouse=True)
def _flat_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's functions need a GPU; `test_with_packages` compares them with these."""
    rules = {(False, True): flat_scan, (True, True): flat_scan, (False, False): flat_scan}
    monkeypatch.setattr(levels, "_functions", lambda: rules)


def make_arguments(count: int, rule: str, seed: int = 0) -> list[Tensor]:
    """q, k [N, 2, 3], v [N, 4, 2], g and perhaps beta, float64, as leaves."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(count, 2, 3), dim=-1) for _ in range(2))
    g = -draw(count, 4, *([3] if rule == "kda" else [])).abs() / 4
    arguments = [q, k, draw(count, 4, 2), g] + ([] if rule == "mamba2" else [draw(count, 4).sigmoid()])
    return [each.requires_grad_() for each in arguments]


def error(end: Tensor, rule: str, seed: int = 0) -> float:
    """The largest relative difference of output and gradients from those token by token."""
    arguments = make_arguments(end.numel(), rule, seed)
    beta = arguments[4] if len(arguments) == 5 else None
    q, k, v, g = arguments[:4]
    results = []
    for out in (
        scan_by_levels(q, k, v, g, beta, build_levels(end)),
        scan_tokens(q, k, v, g, beta, find_parents(flatten_ends(end))),
    ):
        weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
        results.append([out.detach(), *torch.autograd.grad(out, arguments, weights, materialize_grads=True)])
    return max(float((x - y).norm() / y.norm().clamp(min=1e-300)) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "end",
    [
        ends_of((65, -1), (64, 0), (1, 0), (2, 2)),
        star(2, 9, 1),
        chain(5),
        ends_of(*[(1, -1)] * 4),
        torch.cat([ends_of((3, -1), (2, 0), (1, 0), *[(1, -1)] * 4), ends_of((1, -1), (4, -1), (3, 1), (2, 1))]),
    ],
    ids="chunks star chain one-token-trees rows-with-padding".split(),
)
def test_levels_equal_the_definition_token_by_token(end: Tensor, rule: str) -> None:
    assert error(end, rule) < 1e-12


@given(st.integers(0, 10_000), st.integers(1, 30), st.sampled_from(RULES))
def test_random_rows_by_levels_equal_the_definition(seed: int, length: int, rule: str) -> None:
    assert error(torch.cat([random_tree(length, seed), random_tree(length, seed + 1)]), rule, seed) < 1e-12


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_every_token_is_in_one_place_and_every_node_below_its_parent(seed: int, length: int) -> None:
    end = torch.cat([random_tree(length, seed), random_tree(length, seed + 1)])
    table, parent = build_levels(end), find_parents(flatten_ends(end)).tolist()
    assert sorted(table.order.tolist()) == list(range(2 * length))
    assert table.order[table.place].tolist() == list(range(2 * length))
    lists = torch.split(table.order, list(table.sizes))
    for depth, level in enumerate(table.levels):
        tokens, bounds = lists[depth].tolist(), level.bounds.tolist()
        assert bounds[-1] == len(tokens)
        for node, begin in enumerate(bounds[:-1]):
            inside = tokens[begin : bounds[node + 1]]
            assert [parent[token] for token in inside[1:]] == inside[:-1]
            above = -1
            if depth > 0:
                last = int(table.levels[depth - 1].bounds[level.parents[node] + 1]) - 1
                above = int(lists[depth - 1][last])
            assert parent[inside[0]] == above
    assert all(parent[token] == -1 and token not in parent for token in lists[-1].tolist())


def test_a_decay_per_key_dimension_needs_beta() -> None:
    q, k, v, g, _ = make_arguments(4, "kda")
    assert "only with beta; compute it by torch" in refusal(scan_by_levels, q, k, v, g, None, build_levels(chain(4)))


@pytest.mark.parametrize(
    ("versions", "capability", "vector_decay", "expected"),
    [
        ({}, None, False, "needs flash-linear-attention; run pip install"),
        ({"fla-core": "0.5.2"}, None, False, "needs flash-linear-attention 0.6.0, and 0.5.2 is installed; run pip"),
        ({"fla-core": "0.6.0"}, None, False, None),
        (
            {"fla-core": "0.6.0", "triton": "3.6.0"},
            (9, 0),
            False,
            "Hopper GPUs with Triton 3.6.0; install triton 3.7.1",
        ),
        ({"fla-core": "0.6.0", "triton": "3.6.0"}, (9, 0), True, None),
        ({"fla-core": "0.6.0", "triton": "3.6.0"}, (8, 0), False, None),
        ({"fla-core": "0.6.0", "triton": "3.7.1+gitabc"}, (9, 0), False, None),
    ],
)
def test_versions_that_cannot_be_used_are_named(
    versions: dict[str, str],
    capability: tuple[int, int] | None,
    vector_decay: bool,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(levels, "version", lambda name: _look_up(versions, name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    obstacle = obstacle_of_fla.__wrapped__(vector_decay=vector_decay)
    assert obstacle is None if expected is None else expected in str(obstacle)


def _look_up(versions: dict[str, str], name: str) -> str:
    if name not in versions:
        raise importlib.metadata.PackageNotFoundError(name)
    return versions[name]

"""Real rollouts, if they are beside the checkout: read, packed, checked, with the sharing measured before."""

from __future__ import annotations

from collections import Counter

import pytest

from support.manifests import manifest_of
from support.paths import REAL, ROOT
from treepack.analysis.capacities import forecast_lines, plan_capacities
from treepack.costs.model_cost import operations, read_shape, shape_of
from treepack.costs.presets import PRESETS
from treepack.ingest.options import BuildOptions
from treepack.ingest.stream import read, usable
from treepack.pack.capacity import fit_capacity
from treepack.pack.check import check_packed
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.planning import plan_rows
from treepack.pack.rows import pack_rows
from treepack.sequences import collect
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.check import check_trie
from treepack.trie.trie import Trie

TOKENIZER = str(ROOT / "sample_data" / "tokenizer")
SOURCES = {
    "tau-bench": "tau-bench-airline/gpt-4o-airline.json.gz",
    "toolbench": "toolbench-dfsdt",
    "swe-agent": "swe-agent-lite/*/django__django-11*",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not REAL.is_dir(), reason="THERE ARE NO REAL ROLLOUTS beside the checkout: none is tested"),
]


def built(source: str, expand: str, share: str = "all") -> tuple[Trie, Counter[str]]:
    counts: Counter[str] = Counter()
    options = BuildOptions(tokenizer=TOKENIZER, expand=expand)
    stream = read([str(REAL / SOURCES[source])], options)
    return build_trie(collect(usable(stream, counts)), share=share), counts


@pytest.mark.parametrize("source", SOURCES)
def test_recurrent_layers_bring_the_gain_closer_to_the_ratio_of_tokens(source: str) -> None:
    trie, _ = built(source, "trajectory")
    planned = list(plan_capacities(trie, [65_536], method="contiguous", too_long="drop"))
    for line in forecast_lines(trie, planned, method="contiguous"):
        for name in ("qwen3.5-4b", "qwen3.5-35b-a3b"):
            attention = shape_of({**PRESETS[name], "full_attention_interval": 1}, name="attention in every layer")
            shapes = (attention, read_shape(name))
            gains = [operations(shape, line.flat) / operations(shape, line.packed) for shape in shapes]
            assert gains[0] < gains[1] < line.flat.tokens / line.packed.tokens


def cost_of(trie: Trie, plan: Plan) -> tuple[int, int]:
    totals = check_plan(trie, plan)
    return totals.tokens_packed, totals.num_rows


@pytest.mark.parametrize(
    ("source", "expand", "share", "num_trajectories", "por"),
    [
        ("tau-bench", "trajectory", "group", 200, (0.20, 0.34)),
        ("tau-bench", "turns", "all", 2454, (0.89, 0.95)),
        ("toolbench", "trajectory", "all", 111, (0.72, 0.84)),
        ("toolbench", "turns", "all", 248, (0.84, 0.95)),
        ("swe-agent", "trajectory", "all", None, (0.06, 0.20)),
        ("swe-agent", "turns", "all", None, (0.80, 0.90)),
    ],
)
def test_a_source_is_read_packed_and_given_back(
    source: str, expand: str, share: str, num_trajectories: int | None, por: tuple[float, float]
) -> None:
    trie, counts = built(source, expand, share)
    check_trie(trie)
    assert not any(reason.startswith("skipped") for reason in counts if "extension" not in reason)
    assert num_trajectories in (None, trie.num_trajectories)
    assert por[0] < 1 - trie.tokens_tree / trie.tokens_flat < por[1]
    for capacity in (8192, 32768):
        fitted, _ = fit_capacity(trie, capacity, too_long="truncate")
        plan = plan_rows(fitted, capacity=capacity)
        cost = cost_of(fitted, plan)
        for other in ("contiguous", "heuristic", "greedy-online"):
            assert cost <= cost_of(fitted, plan_rows(fitted, capacity=capacity, method=other)), other
        rows = list(pack_rows(fitted, plan))
        check_packed(rows, manifest_of(rows, capacity), fitted)

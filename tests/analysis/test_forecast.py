"""The forecast: every figure equals a count over actual samples and actual packed rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support import strategies
from support.command_line import Run
from support.paths import SAMPLE_DATA
from support.refusal import refusal
from support.strategies import make
from support.turns import length, one_per_turn, turns_of_chats
from treepack.analysis import forecast
from treepack.analysis.capacities import forecast_lines, plan_capacities
from treepack.analysis.forecast import (
    APPEND_ONLY,
    ForecastLine,
    RowCounter,
    flat_work,
    tree_work,
    turns_work,
)
from treepack.analysis.turns import cut_to_turns, turns_of
from treepack.costs.model_cost import FlopCount
from treepack.pack.capacity import usual_capacities
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.totals import trie_totals
from treepack.trie.trie import Trie, trajectories_of


def cut_after(trajectory: Trajectory, end: int) -> Trajectory:
    content = trajectory.content
    assert isinstance(content, Tokens)
    # The end of a turn cuts no span: spans [3, 4) and [5, 7) cut after 5 tokens leave [3, 4).
    kept = content.ends <= end
    spans = (content.starts[kept], content.ends[kept], content.span_weights[kept])
    return replace(trajectory, content=Tokens(content.tokens[:end], *spans))


def work_of(rows: list[Row]) -> FlopCount:
    """Return tokens, score pairs and targets of rows, by the definition of each."""
    work = FlopCount(0, 0, 0)
    for row in rows:
        # Query q sees the tokens k <= q whose subtree ends after q.
        seen = [int(np.sum((np.arange(row.num_tokens) <= q) & (row.subtree_end > q))) for q in range(row.num_tokens)]
        work += FlopCount(row.num_tokens, sum(seen), int((row.loss_weight > 0).sum()))
    return work


def one_by_one(trie: Trie) -> FlopCount:
    """Return the work of the trajectories in rows that share nothing."""
    # Method "sequence" plans unshared copies, so the rows come from a trie that shares nothing.
    plan = plan_rows(trie, capacity=1000, method="sequence")
    return work_of(list(pack_rows(build_trie(trajectories_of(trie), share="none"), plan)))


@given(rollouts=strategies.trajectories(), limit=st.integers(1, 12))
def test_a_trie_cut_to_its_turns_is_that_of_trajectories_cut_there(rollouts: list[Trajectory], limit: int) -> None:
    trie = build_trie(rollouts)
    turns = turns_of(trie).within(limit)
    lengths = {t.trajectory_id: max(map(length, one_per_turn(t)), default=0) for t in rollouts}
    short = {t.trajectory_id: [length(each) for each in one_per_turn(t) if length(each) <= limit] for t in rollouts}
    assume(any(short.values()))
    expected = build_trie([cut_after(t, max(short[t.trajectory_id])) for t in rollouts if short[t.trajectory_id]])
    cut = cut_to_turns(trie, turns)
    for name in ("node_start", "node_end", "parent", "depth", "num_passing", "end_node"):
        np.testing.assert_array_equal(getattr(cut, name), getattr(expected, name), err_msg=name)
    columns = ["trajectory_id", "node_id", "num_tokens", "trained"]
    spans = [sorted(map(str, each.trajectories.select(columns).to_pylist())) for each in (cut, expected)]
    # cut_to_turns returns the trie itself if every trajectory ends with a turn that fits.
    whole = max(lengths.values()) <= limit and all(length(t) == lengths[t.trajectory_id] for t in rollouts)
    assert (cut is trie) == whole
    if not whole:
        assert spans[0] == spans[1]


@given(rollouts=strategies.trajectories(steps=False), limit=st.integers(4, 12))
def test_turns_are_forecast_as_if_each_were_made(rollouts: list[Trajectory], limit: int) -> None:
    trie = build_trie(rollouts)
    turns = turns_of(trie).within(limit)
    made = [turn for t in rollouts for turn in one_per_turn(t) if length(turn) <= limit]
    assume(made)
    real, cut = build_trie(made), cut_to_turns(trie, turns)
    assert turns_work(trie, turns) == flat_work(real)
    assert tree_work(cut) == tree_work(real)


@given(strategies.trajectories(steps=False))
def test_trajectories_one_by_one_are_rows_that_share_nothing(rollouts: list[Trajectory]) -> None:
    trie = build_trie(rollouts)
    assert flat_work(trie) == one_by_one(trie)


@given(rollouts=strategies.trajectories(), capacity=st.integers(9, 24))
def test_plans_and_packed_rows_have_the_counted_work(rollouts: list[Trajectory], capacity: int) -> None:
    trie = build_trie(rollouts)
    (planned,) = plan_capacities(trie, [capacity], method="contiguous", too_long="error")
    rows = list(pack_rows(trie, planned.plan))
    lines = forecast_lines(trie, [planned], method="contiguous")
    assert (lines[1].capacity, lines[1].packed) == (capacity, work_of(rows))
    counter = RowCounter()
    assert list(counter.over(rows)) == rows
    totals = trie_totals(trie)
    of_rows = counter.line(capacity, totals)
    assert of_rows.packed == work_of(rows)
    # The manifest counts trained tokens of any weight; rows have no targets of trajectories of weight 0.
    weights = trie.trajectories["weight"].to_numpy()
    targets = totals["tokens_trained"] if (weights > 0).all() else of_rows.flat.targets
    assert of_rows.flat == replace(flat_work(trie), targets=targets)


def test_both_ways_come_from_either() -> None:
    chats, turns = turns_of_chats()
    lines = []
    for rollouts in (chats, turns):
        trie = build_trie(rollouts)
        planned = list(plan_capacities(trie, [8, 64], method="contiguous", too_long="error"))
        lines.append(forecast_lines(trie, planned, method="contiguous"))
    assert [line.samples for line in lines[0]] == ["trajectories"] * 3 + ["turns"] * 3
    # Of token ids, the turns that continue each other are one append-only sequence.
    assert [replace(line, baseline=APPEND_ONLY) for line in lines[0][:3]] == lines[1][3:]
    assert lines[0][3:] == lines[1][:3]
    # Three chats of 7 tokens: 7 * 8 / 2 = 28 pairs, 3 trained. By turns, samples of 4 tokens (10 pairs) come on top.
    assert lines[0][0].flat == FlopCount(21, 3 * 28, 9)
    assert lines[0][3].flat == FlopCount(33, 3 * (28 + 10), 9)


def test_turns_that_fit_are_kept_of_trajectories_that_do_not() -> None:
    chats, _ = turns_of_chats()
    trie = build_trie([*chats, make("short", [1, 2], group="g9")])
    planned = list(plan_capacities(trie, [5], method="contiguous", too_long="drop"))
    # [1::2]: the lines with capacity 5. Chats of 7 tokens do not fit, but their first turns of 4 tokens do.
    lines = {line.samples: line for line in forecast_lines(trie, planned, method="contiguous")[1::2]}
    assert (lines["trajectories"].num_left_out, lines["trajectories"].flat.tokens) == (3, 2)
    assert (lines["turns"].num_left_out, lines["turns"].flat.tokens) == (3, 3 * 4 + 2)


def test_whole_trajectories_are_derived_from_turns_only_if_all_turns_fit() -> None:
    _, turns = turns_of_chats()
    trie = build_trie(turns)
    planned = list(plan_capacities(trie, [5, 7], method="contiguous", too_long="drop"))
    lines = forecast_lines(trie, planned, method="contiguous")
    assert [(line.samples, line.capacity) for line in lines] == [
        ("turns", None),
        ("turns", 5),
        ("turns", 7),
        ("trajectories", None),
        ("trajectories", 7),
    ]


def test_single_turns_that_share_a_prompt_have_one_line() -> None:
    trie = build_trie([make(f"t{i}", [1, 2, i], spans=[(2, 3, 1.0)]) for i in range(4)])
    # Flat: 4 samples of 3 tokens, 6 pairs each. Tree: prompt of 2 tokens (3 pairs), 4 tokens that see 3 each.
    (line,) = forecast_lines(trie, [], method="contiguous")
    assert line == ForecastLine("trajectories", None, FlopCount(12, 24, 4), FlopCount(6, 3 + 12, 4))


def test_devices_have_names_or_rates() -> None:
    assert forecast.read_device("H200").rate == pytest.approx(771e12, rel=0.01)
    assert forecast.read_device("123.5").rate == 123.5e12
    for wrong in ("h900", "-1", "0", "nan", "inf"):
        assert "b200, l40s, rtx4090, rtx5090 or a rate in TFLOP/s" in refusal(forecast.read_device, wrong)


def test_usual_capacities_hold_every_trajectory() -> None:
    def usual(size: int) -> list[int]:
        return usual_capacities(build_trie([make("t", [1] * size)]))

    assert usual(10) == [16_384, 65_536]
    assert usual(16_385) == [65_536]
    assert usual(65_537) == [131_072]


@pytest.fixture
def chats(treepack: Run, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that builds a trie of the sample conversations and returns its directory."""

    def build(expand: str) -> Path:
        out = tmp_path / expand
        arguments = (SAMPLE_DATA / "chat.jsonl", "--tokenizer", SAMPLE_DATA / "tokenizer", "--expand", expand)
        assert treepack("build-trie", *arguments, "--out", out).status == 0
        return out

    return build


def forecast_of(treepack: Run, *arguments: str | Path | float) -> dict[str, Any]:
    """Return the forecast of `treepack stats`."""
    report = treepack("stats", *arguments, "--json").json["forecast"]
    assert isinstance(report, dict)
    return report


def test_turns_of_whole_conversations_are_forecast_as_their_expansion(
    treepack: Run, chats: Callable[..., Path]
) -> None:
    reports = [forecast_of(treepack, chats(expand)) for expand in ("trajectory", "turns")]
    lines = [{(line["samples"], line["capacity"]): line for line in report["lines"]} for report in reports]
    assert lines[0].keys() == lines[1].keys()
    # 2 %: an expansion cuts off the tokens after the last turn, and the plans differ a little.
    for key in lines[0]:
        assert lines[0][key]["speedup"] == pytest.approx(lines[1][key]["speedup"], rel=0.02), key
    assert lines[0]["turns", None] == lines[1]["turns", None]


def test_stats_ends_with_a_forecast_and_a_verdict(treepack: Run, chats: Callable[..., Path], tmp_path: Path) -> None:
    trie = chats("turns")
    packed = tmp_path / "packed"
    assert treepack("pack", trie, "--capacity", 4096, "--out", packed).status == 0
    options = ("--model", "llama-3.1-8b", "--device", "100")
    before = forecast_of(treepack, trie, "--capacity", 4096, *options)
    after = forecast_of(treepack, packed, *options)
    predicted = next(line for line in before["lines"] if (line["samples"], line["capacity"]) == ("turns", 4096))
    sequences = next(line for line in before["lines"] if (line["samples"], line["capacity"]) == ("append_only", 4096))
    assert after["lines"] == [predicted | {"samples": "rows", "baseline": "samples"}, sequences]
    assert (after["model"], after["flops_per_second"]) == ("llama-3.1-8b", 1e14)
    assert after["device"] is None


def test_stats_is_a_verdict_a_table_and_a_line_of_memory(treepack: Run, chats: Callable[..., Path]) -> None:
    trie = chats("trajectory")
    lines = treepack("stats", trie).out.splitlines()
    number, sequence = r"[\d.]+x", "one append-only sequence per conversation"
    gain = rf"Tree training pays {number} in rows of 16,384 tokens against {sequence} "
    others = rf"\({number} against each trajectory alone, {number} against one trajectory per turn\)\."
    assert lines[0] == "32 conversations, 96 trajectories: the template rewrites earlier turns"
    assert re.fullmatch(gain + others, lines[1])
    assert lines[3].split() == ["capacity", "rows", "tokens", "sharing", "speedup", "memory"]
    end = next(i for i, line in enumerate(lines) if line.startswith("Speedup and memory"))
    table = [line.split() for line in lines[4:end]]
    assert [row[0] for row in table if row[0].endswith("*")] == ["16,384*"]
    assert len({(row[1], row[2]) for row in table}) == len(table)  # equal plans are one line
    divided = "(the table has the memory of each of 2)"
    assert lines[end] == f"Speedup and memory are those of qwen3-8b {divided}; give --model for yours."
    sentence = "qwen3-8b with AdamW in fp32 does not fit one h200; use 2 GPUs or LoRA"
    assert f"\n{sentence} {divided}.\n" in treepack("stats", trie, "--model", "qwen3-8b").out
    assert lines[end + 1] == "28.7 % of the tokens lost their sharing, most by template; see --verbose."
    kept = r"A template that keeps earlier turns \(docs/templates.md\) computes up to 28.7 % fewer tokens"
    figures = re.fullmatch(rf"{kept}: up to ([\d.]+)x instead of ([\d.]+)x\.", lines[end + 2])
    assert figures is not None
    # 10,536 of 36,708 tokens are lost by the template, as docs/templates.md shows
    assert float(figures[1]) == pytest.approx(float(figures[2]) / (1 - 10_536 / 36_708), rel=0.01)
    assert len(lines) == end + 5  # and a note about the template
    assert "e-0" not in treepack("stats", trie, "--verbose").out  # times have a unit that fits
    rate = "hours at 50.0 % of 400 TFLOP/s".removeprefix("hours ")
    assert rate in treepack("stats", trie, "--device", 400, "--verbose").out


@pytest.mark.parametrize("nested", [True, False])
def test_stats_says_what_tool_schemas_beside_the_logs_would_change(
    treepack: Run, tmp_path: Path, *, nested: bool
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    function = {"name": "find_order", "description": "Find an order. " * 60, "parameters": {"type": "object"}}
    tools = folder / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": function} if nested else function]))
    turns = [{"role": "user", "content": "Hello"}]
    records = [{"messages": [*turns, {"role": "assistant", "content": f"{i} is here. " * 40}]} for i in range(6)]
    (folder / "logs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    reading = ("--tokenizer", SAMPLE_DATA / "tokenizer")
    without: Any = treepack("stats", folder, *reading, "--json").json
    given: Any = treepack("stats", folder / "logs.jsonl", "--tools", tools, *reading, "--json").json
    assert without["counts"]["skipped: tool schemas, to give with --tools FILE"] == 1
    assert without["tools"] == {"file": str(tools), "gain": given["forecast"]["gain"]}
    assert given["forecast"]["gain"]["speedup"] > 1.1 * without["forecast"]["gain"]["speedup"]
    assert f"x with --tools {tools}." in treepack("stats", folder, *reading).out
    assert "tools" not in treepack("stats", folder, *reading, "--tools", tools, "--json").json
    refused = treepack("stats", tools, *reading)
    assert (refused.status, refused.out) == (1, "")
    assert "is a tool schema and not a rollout; give its file with --tools" in refused.err


def test_the_verdict_of_a_check_is_the_last_line(treepack: Run, chats: Callable[..., Path]) -> None:
    lines = treepack("stats", chats("trajectory"), "--check", "--verbose").out.splitlines()
    assert lines[-1].startswith("checked: ")
    assert lines[-1].endswith(": all correct")


def test_equal_baselines_are_one_line(treepack: Run) -> None:
    data = (SAMPLE_DATA / "search_tree.json", "--tokenizer", SAMPLE_DATA / "tokenizer")
    lines = forecast_of(treepack, *data)["lines"]
    same = [tuple(line[name] for name in ("capacity", "flops_flat", "flops")) for line in lines]
    assert len(set(same)) < len(same)
    table = [line for line in treepack("stats", *data, "--verbose").out.splitlines() if "samples, append_only " in line]
    assert len(table) == 2


def test_the_command_line_has_the_defaults_of_the_library() -> None:
    options = {option.name: option.default for option in import_module("treepack_cli.stats").stats.params}
    assert (options["model"], options["device"]) == (forecast.DEFAULT_MODEL, forecast.DEFAULT_DEVICE)


def test_a_wrong_model_is_refused_before_anything_is_read(treepack: Run, tmp_path: Path) -> None:
    (tmp_path / "damaged.jsonl").write_text("{")
    result = treepack("stats", tmp_path / "damaged.jsonl", "--model", "qwen3-9b")
    assert result.status == 1
    assert "qwen3-9b: no such config.json" in result.err

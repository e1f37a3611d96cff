"""The baselines of the forecast, and its verdict: never rosier than training each sample alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import strategies
from support.turns import one_per_turn, tokens_of, turns_of_chats
from treepack.analysis.capacities import forecast_lines, plan_capacities
from treepack.analysis.forecast import (
    APPEND_ONLY,
    SAMPLES,
    TRAJECTORIES,
    TURNS,
    ForecastLine,
    TrainingDevice,
    flat_work,
    once_work,
    turns_work,
)
from treepack.analysis.turns import turns_of
from treepack.analysis.verdict import baseline_notes, forecast_report, gain_headline
from treepack.costs.model_cost import FlopCount, ModelShape, operations
from treepack.ingest.conversation_counts import AppendOnly, Conversations
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.totals import trie_totals
from treepack.trie.trie import Trie, trajectories_of

# Small primes, so that a wrong factor or a swapped pair changes every result.
SHAPE = ModelShape("made", weights=7, output=11, scores=3)
DEVICE = TrainingDevice("made", 1e12)


@given(rollouts=strategies.trajectories(steps=False), num_records=st.integers(1, 4))
def test_a_turn_that_several_paths_of_a_record_have_counts_once(rollouts: list[Trajectory], num_records: int) -> None:
    rollouts = [replace(t, source=f"r.jsonl:{i % num_records}") for i, t in enumerate(rollouts)]
    trie = build_trie(rollouts)
    seen: dict[tuple[object, ...], FlopCount] = {}
    # In the order of the trie, because of equal turns the first one counts, with its weight.
    for turn in (turn for t in trajectories_of(trie) for turn in one_per_turn(t)):
        content = tokens_of(turn)
        seen.setdefault((turn.source, content.tokens.tobytes(), int(content.starts[0])), flat_work(build_trie([turn])))
    distinct = turns_of(trie).distinct(trie)
    assert len(distinct.ends) == len(seen)
    assert turns_work(trie, distinct) == sum(seen.values(), FlopCount(0, 0, 0))


def test_a_trie_of_turns_counts_a_turn_of_several_paths_once() -> None:
    # Two paths of one record with the same first turn of 4 tokens, and second turns of 7; then the same of two records.
    chats, _ = turns_of_chats(1)
    paths = [replace(chats[0], trajectory_id=name, source="tree.json") for name in "ab"]
    trie = build_trie([turn for path in paths for turn in one_per_turn(path)])
    assert once_work(trie) == FlopCount(4 + 7, 10 + 28, 1 + 2)
    apart = build_trie([turn for path in paths for turn in one_per_turn(replace(path, source=path.trajectory_id))])
    assert once_work(apart) == flat_work(apart) == FlopCount(22, 76, 6)


def conversations_of(trie: Trie, work: FlopCount, *, num_absent: int = 0) -> Conversations:
    """Return a reading of as many conversations as `trie` has samples, with append-only sequences of this `work`."""
    num, flat = trie.num_trajectories, trie.tokens_flat
    sums = AppendOnly(num, work.tokens, work.pairs, work.targets, num_absent)
    return Conversations(num, num, num, flat, num, num, 0, 0, 0, 0, 0, sums)


def test_append_only_sequences_are_compared_with_the_rows_of_the_samples() -> None:
    chats, _ = turns_of_chats()
    trie = build_trie([*chats, strategies.make("short", [1, 2], group="g9")])
    planned = list(plan_capacities(trie, [5, 64], method="contiguous", too_long="drop"))
    work = FlopCount(15, 40, 9)
    lines = forecast_lines(trie, planned, method="contiguous", conversations=conversations_of(trie, work))
    own, append_only = ([line for line in lines if line.baseline == name] for name in (SAMPLES, APPEND_ONLY))
    # Sums over all sequences say nothing about the samples that fit 5 tokens.
    assert [line.capacity for line in append_only] == [None, 64]
    assert all(line.flat == work for line in append_only)
    assert [line.packed for line in append_only] == [own[0].packed, own[2].packed]


@pytest.mark.parametrize("fault", ["stale", "absent"])
def test_append_only_sequences_are_not_used_if_they_are_not_known(fault: str) -> None:
    chats, _ = turns_of_chats()
    trie = build_trie(chats)
    known = conversations_of(trie, FlopCount(15, 40, 9), num_absent=int(fault == "absent"))
    if fault == "stale":
        known = replace(known, num_samples=4)
    lines = forecast_lines(trie, [], method="contiguous", conversations=known)
    assert APPEND_ONLY not in {line.baseline for line in lines}
    (note,) = baseline_notes(known, trie_totals(trie))
    assert {"stale": "trajectories were removed", "absent": "for 1 of 3 conversations"}[fault] in note


def test_notes_mention_equal_baselines_and_equal_expansions() -> None:
    chats, _ = turns_of_chats()
    trie = build_trie(chats)
    totals, work = trie_totals(trie), flat_work(trie)
    read = replace(conversations_of(trie, work), num_turns=6)
    same_sequences = "each trajectory is the append-only sequence of its conversation, so both baselines are the same"
    assert baseline_notes(read, totals) == [same_sequences]
    split = conversations_of(trie, replace(work, tokens=20))
    assert baseline_notes(split, totals) == ["--expand trajectory and --expand turns give the same trajectories"]
    assert "token ids or plain text" in baseline_notes(None, totals)[0]


def test_the_report_follows_from_the_lines() -> None:
    flat, packed = FlopCount(1000, 9000, 100), FlopCount(200, 3000, 90)
    result = forecast_report([ForecastLine("turns", 64, flat, packed, 2, TURNS)], SHAPE, DEVICE, ["a note"])
    (line,) = result["lines"]
    assert line["flops_flat"] == 6 * (7 * 1000 + 11 * 100 + 3 * 9000) == operations(SHAPE, flat)
    assert line["speedup"] == pytest.approx(operations(SHAPE, flat) / operations(SHAPE, packed))
    assert (line["sharing"], line["num_left_out"], line["capacity"]) == (0.8, 2, 64)
    assert result["baselines"] == [line | {"label": "one trajectory per turn"}]
    assert (result["gain"]["baseline"], result["gain"]["speedup"]) == ("turns", line["speedup"])
    assert result["notes"] == ["a note"]
    assert line["hours"] * 3600 * DEVICE.rate * result["mfu"] == pytest.approx(operations(SHAPE, packed))
    assert json.loads(json.dumps(result)) == result


def line_of(baseline: str, saved: float, capacity: int | None = None, left_out: int = 0) -> ForecastLine:
    """Return a line without attention and output layer, whose speed-up is 1 / (1 - saved)."""
    flat, packed = FlopCount(1000, 0, 0), FlopCount(round(1000 * (1 - saved)), 0, 0)
    return ForecastLine("trajectories", capacity, flat, packed, left_out, baseline)


SEQUENCE = "one append-only sequence per conversation"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([line_of(SAMPLES, 0.8)], "Tree training pays 5.0x against each trajectory alone"),
        (
            [line_of(SAMPLES, 0.03)],
            "Tree training does not pay: it computes 3 % less than each trajectory alone",
        ),
        (
            [line_of(SAMPLES, 0.8), line_of(APPEND_ONLY, 0.5), line_of(TURNS, 0.9)],
            f"Tree training pays 2.0x against {SEQUENCE} (5.0x against each trajectory alone, "
            "10.0x against one trajectory per turn)",
        ),
        # Long reasoning makes append-only sequences dearer than the samples from which the template drops it.
        (
            [line_of(SAMPLES, 0.5), line_of(APPEND_ONLY, 0.75)],
            f"Tree training pays 2.0x against each trajectory alone (4.0x against {SEQUENCE})",
        ),
        (
            [line_of(TURNS, 0.8), line_of(APPEND_ONLY, -0.25)],
            f"Tree training does not pay: it computes 25 % more than {SEQUENCE} (5.0x against one trajectory per turn)",
        ),
        (
            [line_of(SAMPLES, 0.9), line_of(SAMPLES, 0.5, 64), line_of(SAMPLES, 0.8, 32)],
            "Tree training pays 5.0x in rows of 32 tokens against each trajectory alone",
        ),
        (
            [line_of(SAMPLES, 0.8, 32, left_out=9), line_of(SAMPLES, 0.5, 64)],
            "Tree training pays 2.0x in rows of 64 tokens against each trajectory alone",
        ),
    ],
)
def test_the_verdict_is_one_plain_line(lines: list[ForecastLine], expected: str) -> None:
    result = forecast_report(lines, SHAPE, DEVICE)
    assert result["verdict"] == expected
    assert result["pays"] == ("not pay" not in expected)


def test_the_verdict_is_about_the_given_capacity_and_names_it() -> None:
    lines = [line_of(SAMPLES, 0.9), line_of(SAMPLES, 0.8, 32), line_of(SAMPLES, 0.5, 8_192), line_of(TURNS, 0.9, 32)]
    result = forecast_report(lines, SHAPE, DEVICE, capacity=8_192)
    assert result["verdict"] == (
        "Tree training pays 2.0x in rows of 8,192 tokens against each trajectory alone "
        "(10.0x against one trajectory per turn)"
    )
    assert gain_headline(result["gain"]) == "Tree training pays 2.0x in rows of 8,192 tokens"
    loss = forecast_report([line_of(SAMPLES, 0.05, 64)], SHAPE, DEVICE, capacity=64)
    assert gain_headline(loss["gain"]) == "Tree training does not pay in rows of 64 tokens"


saved = st.floats(-0.5, 0.95)


@given(st.dictionaries(st.sampled_from([APPEND_ONLY, SAMPLES, TRAJECTORIES, TURNS]), saved, min_size=1))
def test_the_verdict_is_never_larger_than_against_each_sample_alone(shares: dict[str, float]) -> None:
    result = forecast_report([line_of(name, share) for name, share in shares.items()], SHAPE, DEVICE)
    speedups = {entry["baseline"]: entry["speedup"] for entry in result["baselines"]}
    alone = next((speedups[name] for name in (SAMPLES, TRAJECTORIES, TURNS) if name in speedups), None)
    assert result["gain"]["speedup"] == speedups[result["gain"]["baseline"]]
    assert alone is None or result["gain"]["speedup"] <= alone
    assert result["gain"]["speedup"] <= speedups.get(APPEND_ONLY, alone)

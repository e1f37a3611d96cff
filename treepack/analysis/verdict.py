"""The report of a forecast: speed-ups, hours and one sentence on the gain, ready for JSON.

    ForecastLine, ... --forecast_report--> {"lines": [...], "baselines": [...], "gain": {...},
                                            "verdict": "Tree training pays 1.6x in rows of 8,192 tokens ..."}

Each baseline has one decisive line, that of the chosen capacity. The verdict compares with one append-only sequence
per conversation if that is known, because most trainers make these, or with each trajectory alone if that is cheaper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from treepack.analysis.forecast import (
    APPEND_ONLY,
    MAX_ABSENT,
    MFU,
    SAMPLES,
    TRAJECTORIES,
    TURNS,
    ForecastLine,
    TrainingDevice,
    usable_conversations,
)
from treepack.analysis.glossary import BASELINES
from treepack.costs.model_cost import ModelShape, operations
from treepack.ingest.conversation_counts import Conversations

# Share of saved operations below which the verdict is that tree training does not pay.
_MIN_SAVED = 0.1

_Entry = dict[str, Any]


def forecast_report(
    lines: Iterable[ForecastLine],
    shape: ModelShape,
    device: TrainingDevice,
    notes: Iterable[str] = (),
    *,
    capacity: int | None = None,
) -> _Entry:
    """Return sharing, speed-up, operations and hours on one device for each line, and the verdict, as plain values.

    `notes` are sentences about the baselines, see `baseline_notes`. The verdict is about rows of `capacity` tokens; a
    baseline without such a line has its fastest one.
    """
    rate = device.rate * MFU
    entries = []
    for line in lines:
        flat, packed = operations(shape, line.flat), operations(shape, line.packed)
        entries.append(
            {
                "baseline": line.baseline,
                "samples": line.samples,
                "capacity": line.capacity,
                "num_left_out": line.num_left_out,
                "tokens_flat": line.flat.tokens,
                "tokens_computed": line.packed.tokens,
                "sharing": 1 - line.packed.tokens / line.flat.tokens,
                "speedup": flat / packed,
                "flops_flat": flat,
                "flops": packed,
                "hours_flat": flat / rate / 3600,
                "hours": packed / rate / 3600,
            }
        )
    baselines = _decisive(entries, capacity)
    gain = _gain(baselines)
    return {
        "model": shape.name,
        "device": device.name,
        "flops_per_second": device.rate,
        "mfu": MFU,
        "lines": entries,
        "baselines": list(baselines.values()),
        "gain": {name: gain[name] for name in ("baseline", "label", "capacity", "speedup", "sharing")},
        "pays": _pays(gain),
        "verdict": _gain_verdict(gain, list(baselines.values())),
        "notes": list(notes),
    }


def _decisive(entries: list[_Entry], capacity: int | None) -> dict[str, _Entry]:
    """Return one line for each baseline: that of `capacity`, else the fastest with the fewest trajectories left out.

    A line with a capacity precedes one without.
    """
    best: dict[str, _Entry] = {}
    for entry in entries:
        name = entry["baseline"]
        if name not in best or _rank(entry, capacity) > _rank(best[name], capacity):
            best[name] = entry | {"label": BASELINES[name]}
    return {name: best[name] for name in BASELINES if name in best}


def _rank(entry: _Entry, capacity: int | None) -> tuple[bool, int, bool, float]:
    is_chosen = capacity is not None and entry["capacity"] == capacity
    return is_chosen, -entry["num_left_out"], entry["capacity"] is not None, entry["speedup"]


def _gain(baselines: Mapping[str, _Entry]) -> _Entry:
    """Return the line of the verdict: of append-only sequences and single trajectories, the one that gains less."""
    alone = next(name for name in (SAMPLES, TRAJECTORIES, TURNS, APPEND_ONLY) if name in baselines)
    candidates = [baselines[name] for name in (APPEND_ONLY, alone) if name in baselines]
    return min(candidates, key=lambda entry: float(entry["speedup"]))


def _pays(entry: Mapping[str, Any]) -> bool:
    return bool(1 - 1 / entry["speedup"] >= _MIN_SAVED)


def _gain_verdict(gain: _Entry, baselines: list[_Entry]) -> str:
    """Return one sentence about the `gain`, with the speed-ups against the other `baselines` in brackets."""
    others = [
        f"{entry['speedup']:.1f}x against {entry['label']}"
        for entry in baselines
        if entry["baseline"] != gain["baseline"]
    ]
    if _pays(gain):
        text = f"{gain_headline(gain)} against {gain['label']}"
    else:
        saved = 1 - 1 / gain["speedup"]
        part = f"{100 * saved:.0f} % less" if saved >= 0 else f"{100 * (1 / gain['speedup'] - 1):.0f} % more"
        text = f"{gain_headline(gain)}: it computes {part} than {gain['label']}"
    return text + (f" ({', '.join(others)})" if others else "")


def gain_headline(gain: Mapping[str, Any]) -> str:
    """Return the one figure of `stats` and of the report, from the entry "gain" of a forecast, with its capacity."""
    rows = "" if gain["capacity"] is None else f" in rows of {gain['capacity']:,} tokens"
    if not _pays(gain):
        return f"Tree training does not pay{rows}"
    return f"Tree training pays {gain['speedup']:.1f}x{rows}"


def baseline_notes(conversations: Conversations | None, totals: Mapping[str, Any]) -> list[str]:
    """Return sentences about the append-only baseline of a trie or rows with `totals`."""
    if conversations is None:
        return ["the trajectories are token ids or plain text, each of which is one append-only sequence already"]
    absent, count = conversations.append_only.num_absent, conversations.num_conversations
    if not conversations.describes(totals):
        return [
            "trajectories were removed since the conversations were read, so their append-only sequences are not known"
        ]
    if usable_conversations(conversations, totals) is None:
        return [
            f"the chat template allows no append-only sequence for {absent:,} of {count:,} conversations, more than "
            f"{100 * MAX_ABSENT:.0f} %, so the gain is against each trajectory alone"
        ]
    notes = []
    sums = conversations.append_only
    if conversations.num_turns == conversations.num_parts:
        turns = "--expand turns --per-path" if conversations.num_trees else "--expand turns"
        notes.append(f"--expand trajectory and {turns} give the same trajectories")
    if sums.tokens == conversations.tokens_flat and sums.num_sequences == conversations.num_samples:
        notes.append("each trajectory is the append-only sequence of its conversation, so both baselines are the same")
    if absent:
        notes.append(
            f"the chat template allows no append-only sequence for {absent:,} of {count:,} conversations; their "
            "longest trajectory counts instead"
        )
    if conversations.num_paths and sums.num_sequences:
        notes.append("a search tree has one append-only sequence for each path, as trainers without trees make them")
    return notes

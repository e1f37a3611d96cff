"""Prompts and prefixes of the rollouts in a trie, as queries.

trie, groups --group_prompts--> GroupPrompt(ids, step, fields)       the tokens before the first trained one
trie, prefixes --prefix_parts--> _RecordedPrefix(ids, turns, cuts, cut_ids)  the first tokens of one trajectory

    1 2 3 | 4 5 | 6 | 7 8        trained: 4 5 and 7 8; segments [3, 6]
    1 2 3 | 4 5 | 6              its first 6 tokens: turns [(3, 5)], cuts [3]; the query's own segment starts at 6
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from treepack.errors import TreepackError
from treepack.ingest.readers.fields.rollout_facts import UNTRAINED_PREFIX
from treepack.sequences import SpanView
from treepack.trajectory import Int32
from treepack.trie.trie import Trie, sequences_of


@dataclass(frozen=True, slots=True)
class GroupPrompt:
    """The prompt of a group, int32 [n], the latest step of its rollouts, and the metadata of the first of them."""

    ids: Int32
    step: int | None
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _RecordedPrefix:
    """The first tokens of a trajectory: `ids` int32 [n]; the other attributes have the meaning that `Query` gives."""

    ids: Int32
    group_id: str
    step: int | None
    turns: tuple[tuple[int, int], ...]
    cuts: tuple[int, ...]
    cut_ids: tuple[int, ...]
    fields: dict[str, Any]


def group_prompts(trie: Trie, path: str, groups: Iterable[str]) -> dict[str, GroupPrompt]:
    """Return the prompt of each of `groups` that `trie` contains; of several steps, that of the latest one.

    A continuation starts with the prompt of its group, and then has tokens that no trajectory samples twice. So the
    prompt is the shortest one, with which all others must start.

    Raises:
        TreepackError: rollouts of a group have different prompts.
    """
    names = trie.trajectories["group_id"].to_pylist()
    steps, ranks, wanted = trie.trajectories["step"].to_pylist(), trie.step_rank, set(groups)
    latest: dict[str, int] = {}
    for i, name in enumerate(names):
        if name in wanted:
            latest[name] = max(latest.get(name, 0), int(ranks[i]))
    members: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        if name in latest and int(ranks[i]) == latest[name]:
            members.setdefault(name, []).append(i)
    chosen = [i for each in members.values() for i in each]
    spans, sequences = SpanView.of(trie.trajectories), _sequences(trie, set(chosen))
    prompts = {i: sequences[i][: spans[i][0][0] if len(spans[i][0]) else None] for i in chosen}
    result = {}
    for name, rollouts in members.items():
        shortest = min((prompts[i] for i in rollouts), key=len)
        if len(shortest) == 0 or any(not np.array_equal(prompts[i][: len(shortest)], shortest) for i in rollouts):
            raise TreepackError(
                f"{path}: rollouts of the group {name} start with different prompts; give the file that has its prompt "
                "with --prompts"
            )
        first = rollouts[0]
        result[name] = GroupPrompt(shortest.copy(), steps[first], _metadata(trie, [first])[first])
    return result


def prefix_parts(
    trie: Trie, path: str, prefixes: Mapping[tuple[str, int], str]
) -> dict[tuple[str, int], _RecordedPrefix]:
    """Return the prefix of each of `prefixes`: trajectory id and number of tokens; the value names it in errors.

    Raises:
        TreepackError: a trajectory that the trie does not contain, or that is shorter.
    """
    index = {name: i for i, name in enumerate(trie.trajectories["trajectory_id"].to_pylist())}
    for (name, size), source in prefixes.items():
        if name not in index:
            raise TreepackError(f"{source}: the trie {path} has no trajectory {name!r}; give the trie it is from")
        if not 1 <= size <= trie.lengths[index[name]]:
            raise TreepackError(
                f"{source}: num_tokens is {size} and trajectory {name!r} of {path} has {trie.lengths[index[name]]} "
                "tokens; give the trie that the table was made from"
            )
    chosen = {index[name] for name, _ in prefixes}
    metadata: dict[int, dict[str, Any]] = {}
    waiting = chosen
    # A continuation's prompt has the turns of its parent, whose prompt may itself be a prefix of a rollout.
    while waiting:
        found = _metadata(trie, waiting)
        metadata |= found
        waiting = {index[name] for fields in found.values() if (name := _parent(fields)[0]) in index} - metadata.keys()
    sequences, spans = _sequences(trie, chosen), SpanView.of(trie.trajectories)
    groups, steps = trie.trajectories["group_id"].to_pylist(), trie.trajectories["step"].to_pylist()

    def turns(i: int, end: int) -> list[tuple[int, int]]:
        parent, shared = _parent(metadata[i])
        begun = turns(index[parent], min(end, shared)) if parent in index else reused_turn(metadata[i], end)
        starts, ends, _ = spans[i]
        own = [(a, min(b, end)) for a, b in zip(starts.tolist(), ends.tolist(), strict=True) if a < end]
        return _joined([*begun, *own])

    result = {}
    for name, size in prefixes:
        i = index[name]
        cuts, cut_ids = _cuts(metadata[i], size)
        ids = sequences[i][:size].copy()
        result[name, size] = _RecordedPrefix(
            ids, groups[i], steps[i], tuple(turns(i, size)), cuts, cut_ids, metadata[i]
        )
    return result


def reused_turn(fields: dict[str, Any], end: int) -> list[tuple[int, int]]:
    """Return the span of an augmented query's reused tokens, up to `end`, as one turn; empty for other queries."""
    # untrained_prefix 9, num_reused 4 -> tokens 5 to 8 were sampled. Where observations are among them is not recorded.
    size, reused = fields.get(UNTRAINED_PREFIX), fields.get("num_reused")
    if type(size) is not int or type(reused) is not int or not 0 < reused < size or size - reused >= end:
        return []
    return [(size - reused, min(size, end))]


def _parent(fields: dict[str, Any]) -> tuple[Any, int]:
    """Return the id of the rollout that a continuation continues, None for another rollout, and the shared tokens."""
    parent, shared = fields.get("parent_rollout"), fields.get("parent_tokens")
    return (parent, shared) if isinstance(parent, str) and type(shared) is int else (None, 0)


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge spans that touch: a turn of two loss weights, or one that a continuation was cut inside of."""
    # (3, 5), (5, 7), (9, 12) -> (3, 7), (9, 12)
    result: list[tuple[int, int]] = []
    for start, end in spans:
        if result and result[-1][1] >= start:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def _cuts(fields: dict[str, Any], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the recorded starts of segments below `size` tokens, and their ids; empty if they are not recorded."""
    # segments [3, 6, 9], ids [1, 4, 5], size 6 -> (3,), (1,): the query itself starts a segment at 6.
    segments, ids = fields.get("segments"), fields.get("segment_ids")
    if not isinstance(segments, list) or not all(type(each) is int for each in segments):
        return (), ()
    cuts = tuple(each for each in segments if each < size)
    if not isinstance(ids, list) or len(ids) != len(segments):
        return cuts, ()
    return cuts, tuple(ids[: len(cuts)])


def _metadata(trie: Trie, rollouts: Iterable[int]) -> dict[int, dict[str, Any]]:
    chosen = sorted(rollouts)
    texts: list[str] = trie.trajectories["metadata"].take(pa.array(chosen, pa.int64())).to_pylist()
    return {i: orjson.loads(text) for i, text in zip(chosen, texts, strict=True)}


def _sequences(trie: Trie, rollouts: set[int]) -> dict[int, Int32]:
    return {i: tokens for i, tokens in enumerate(sequences_of(trie)) if i in rollouts}

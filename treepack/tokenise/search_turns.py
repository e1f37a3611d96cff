"""Turns of search trees: with one sample per turn, a turn on several paths of a record is one sample.

    paths of a record     p A B     p A C          p prompt, A B C turns
    one sample per turn   p A (2 paths)     p A B     p A C

Two turns are the same if their record, tokens, trained tokens and temperature are the same, and one of them is not the
last of its path. Equal last turns are independent samples of one prompt, such as the choices of one request. A path
with a reward or an advantage is never merged with a path without it.

The merged sample has the sum of the weights of its paths, and the weighted mean of their rewards and of their
advantages. So a loss that is linear in the advantage has the same gradient as with one sample for each path; a clipped
loss clips the mean advantage once, instead of each path alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from treepack.trajectory import ON_SEVERAL_PATHS, Chat, Outcome, Tokens, Trajectory

# Sums in the log of reading: records that are search trees, their paths, the turns that several paths have, counted
# once for each path, and the samples that these turns became.
TREES, PATHS, TURNS_ON_PATHS, MERGED_TURNS = "trees", "paths", "turns_on_paths", "merged_turns"
_NUM_PATHS = "num_paths"  # metadata of a sample: the number of paths that contain its turn

Item = Outcome


def records_of(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Group successive `items` of one record, which have the same source."""
    for _, record in groupby(items, key=lambda item: item.source):
        yield list(record)


def samples_of_record(
    record: list[Item], tokenise: Callable[[Item], Iterable[Item]], *, merge: bool
) -> list[tuple[Item, list[Item]]]:
    """Return each item of a record with its samples; `merge` makes one sample of a turn that several paths have.

    The first path of such a turn has its sample. A path whose turns all belong to earlier paths has no sample.
    """
    pairs = [(item, list(tokenise(item))) for item in record]
    paths = [
        [sample for sample in samples if isinstance(sample, Trajectory)]
        for item, samples in pairs
        if isinstance(item, Trajectory) and isinstance(item.content, Chat)
    ]
    paths = [samples for samples in paths if samples]
    if len(paths) < 2:
        return pairs
    # By identity of the sample: another one in its place, or None if it is merged into an earlier one.
    changed: dict[int, Trajectory | None] = _merged_turns(paths) if merge else {}
    if len({_opening(samples[0]) for samples in paths}) < len(paths):
        first = paths[0][0]
        sample = changed.get(id(first)) or first
        changed[id(first)] = replace(sample, totals=Counter(sample.totals) + Counter({TREES: 1, PATHS: len(paths)}))
    return [
        (item, [new for sample in samples if (new := changed.get(id(sample), sample)) is not None])
        for item, samples in pairs
    ]


def _opening(sample: Trajectory) -> bytes:
    """Return the tokens up to the end of the first turn, which two paths of a search tree may share."""
    content = tokens_of(sample)
    return content.tokens[: content.ends[0]].tobytes()


def _merged_turns(paths: list[list[Trajectory]]) -> dict[int, Trajectory | None]:
    """Return the new sample for the first of each set of equal turns, and None for the others, by their identity."""
    turns: dict[tuple[object, ...], list[Trajectory]] = {}
    for sample in (sample for samples in paths for sample in samples):
        turns.setdefault(_identity(sample), []).append(sample)
    last = {id(samples[-1]) for samples in paths}
    changed: dict[int, Trajectory | None] = {}
    for equal in turns.values():
        if len(equal) > 1 and any(id(sample) not in last for sample in equal):
            changed |= {id(sample): None for sample in equal}
            changed[id(equal[0])] = _merge(equal)
    return changed


def _identity(sample: Trajectory) -> tuple[object, ...]:
    content = tokens_of(sample)
    arrays = (content.tokens, content.starts, content.ends, content.span_weights)
    # A path without a reward has no part in a mean.
    known = (sample.reward is None, sample.advantage is None)
    temperatures = (sample.temperature, None if content.temperature is None else content.temperature.tobytes())
    return (sample.group_id, sample.step, *known, *temperatures, *(array.tobytes() for array in arrays))


def _merge(equal: list[Trajectory]) -> Trajectory:
    """Return one sample for `equal` samples of several paths."""
    first, weights = equal[0], [sample.weight for sample in equal]
    shares = weights if sum(weights) > 0 else [1.0] * len(equal)

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        # Equal values stay as they are, without the rounding of a division.
        same = all(value == known[0] for value in known)
        return known[0] if same else sum(w * x for w, x in zip(shares, known, strict=True)) / sum(shares)

    totals = Counter({TURNS_ON_PATHS: len(equal), MERGED_TURNS: 1})
    for sample in equal:
        totals.update(sample.totals)
    return replace(
        first,
        weight=sum(weights),
        reward=mean([sample.reward for sample in equal]),
        advantage=mean([sample.advantage for sample in equal]),
        metadata=first.metadata | {_NUM_PATHS: len(equal)},
        rollout_id=first.rollout_id or first.trajectory_id,
        rollout_part=ON_SEVERAL_PATHS,
        notes=tuple(note for sample in equal for note in sample.notes),
        totals=totals,
    )


def tokens_of(sample: Trajectory) -> Tokens:
    """Return the content of a `sample`, which is tokenised."""
    assert isinstance(sample.content, Tokens)
    return sample.content

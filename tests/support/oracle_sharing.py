"""Slow, obvious twin of `lost_sharing.added_tokens`: every trajectory is compared with all before it."""

from __future__ import annotations

from dataclasses import dataclass

from treepack.analysis.lost_sharing import CALL
from treepack.trajectory import Tokens, Trajectory


@dataclass(frozen=True)
class Added:
    """The fields of `AddedTokens` of one trajectory; `expected` is the name of a trajectory, None for the first."""

    start: int
    lost: int
    expected: str | None
    common: int
    is_call: bool


def added_by_name(rollouts: list[Trajectory]) -> dict[str, Added]:
    """Return the tokens that each trajectory adds, by its name."""
    before: list[tuple[tuple[object, ...], Trajectory]] = []
    added = {}
    for key, one in sorted(((_key(one), one) for one in rollouts), key=lambda pair: pair[0]):
        start = max((_common(one, other) for _, other in before), default=0)
        same = [other for other_key, other in before if other_key[:3] == key[:3]]
        group = [other for other_key, other in before if other_key[:2] == key[:2]]
        expected = same[-1] if same else group[0] if group else None
        lost = common = 0
        if expected is not None:
            (begin, _), (other_begin, other_end) = _trained_range(one), _trained_range(expected)
            should = min(begin, other_end) if same else begin
            shared = _common(one, expected)
            if start < should and shared < (other_end if same else other_begin):
                lost, common = should - start, shared
        name = None if expected is None else expected.trajectory_id
        added[one.trajectory_id] = Added(start, lost, name, common, bool(same))
        before.append((key, one))
    return added


def _key(one: Trajectory) -> tuple[object, ...]:
    match = CALL.fullmatch(one.trajectory_id)
    rollout, number = (match["rollout"], int(match["number"])) if match else (one.trajectory_id, 0)
    return -1 if one.step is None else one.step, one.group_id, rollout, number, one.trajectory_id


def _common(a: Trajectory, b: Trajectory) -> int:
    if a.step != b.step:  # steps never share a tree
        return 0
    first, second = (_content(each).tokens.tolist() for each in (a, b))
    size = min(len(first), len(second))
    return next((i for i in range(size) if first[i] != second[i]), size)


def _trained_range(one: Trajectory) -> tuple[int, int]:
    content = _content(one)
    if not len(content.starts):
        return len(content.tokens), 0
    return int(content.starts[0]), int(content.ends[-1])


def _content(one: Trajectory) -> Tokens:
    assert isinstance(one.content, Tokens)
    return one.content

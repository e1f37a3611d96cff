"""Lost sharing as a page shows it: tokens by reason, and causes with both texts side by side.

    Trie, decode --read_sharing--> LostSharing: reasons, causes with examples

`lost_sharing` finds the causes. An example shows the text before a parting, and both texts after it as runs; the page
marks the runs that differ. If the texts are equal and only their tokens differ, the runs are the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher

from treepack.analysis.lost_sharing import (
    MAX_PARTINGS,
    Divergence,
    LostCause,
    added_tokens,
    causes_of,
    num_alone,
    path_tokens,
    tokens_by_reason,
)
from treepack.analysis.text_differences import RETOKENISED
from treepack.trajectory import Int64
from treepack.trie.trie import Trie

_MAX_EXAMPLES = 3  # for each cause
BEFORE, AFTER = 160, 360  # characters of an example before and after the parting
TOKENS_BEFORE, TOKENS_AFTER = 12, 24  # tokens of it without a tokenizer, or if the tokens differ
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")

_Decode = Callable[[list[list[int]]], list[str]]


@dataclass(frozen=True, slots=True)
class _TextRun:
    """A part of a text; `kind` is "same", "differs" or "token", one token of a text whose tokens differ."""

    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class _CauseExample:
    """One place: trajectory and other one as numbers, their common tokens, the lost ones, and their texts as runs."""

    trajectory: int
    other: int
    position: int
    lost: int
    before: str
    expected: list[_TextRun]
    actual: list[_TextRun]


@dataclass(frozen=True, slots=True)
class _SharingCause:
    """A cause of lost sharing: its tokens, the number of its places, and examples in different groups if possible."""

    name: str
    tokens: int
    num_places: int
    examples: list[_CauseExample]


@dataclass(frozen=True, slots=True)
class LostSharing:
    """Tokens of a trie by the reason why they are stored, and the causes of lost sharing, the costliest first.

    `num_alone` trajectories are alone in their group. Without a tokenizer, `is_read` is False and a cause only names
    prompt or history.
    """

    reasons: dict[str, int]
    causes: list[_SharingCause]
    num_alone: int
    is_read: bool


def read_sharing(trie: Trie, groups: Int64, decode: _Decode | None, show: _Decode | None) -> LostSharing:
    """Return the reasons for all tokens of `trie` and the causes of lost sharing.

    Args:
        trie: the trie.
        groups: the group of each trajectory, int64 [num_trajectories].
        decode: converts lists of token ids to texts, from which causes are read; None without a tokenizer.
        show: converts them to the texts of examples; None for examples without text.
    """
    tokens = added_tokens(trie)
    causes = causes_of(trie, tokens, decode, most=MAX_PARTINGS)
    return LostSharing(
        reasons=tokens_by_reason(trie, tokens),
        causes=[
            _SharingCause(
                cause.name,
                cause.tokens,
                len(cause.partings),
                [_example(trie, one, cause.name, show) for one in _examples(cause, groups)],
            )
            for cause in causes
        ],
        num_alone=num_alone(trie),
        is_read=decode is not None,
    )


def _examples(cause: LostCause, groups: Int64) -> list[Divergence]:
    """Return the costliest partings of different groups, or else of any."""
    first: dict[int, Divergence] = {}
    for parting in cause.partings:
        first.setdefault(int(groups[parting.trajectory]), parting)
    chosen = list(first.values())[:_MAX_EXAMPLES]
    others = (parting for parting in cause.partings if parting not in chosen)
    while len(chosen) < min(_MAX_EXAMPLES, len(cause.partings)):
        chosen.append(next(others))
    return sorted(chosen, key=lambda parting: -parting.lost)


def _example(trie: Trie, parting: Divergence, cause: str, show: _Decode | None) -> _CauseExample:
    place = (parting.trajectory, parting.other, parting.position, parting.lost)
    if show is None:
        return _CauseExample(*place, "", [], [])
    difference = parting.difference
    if difference is None or cause == RETOKENISED:
        return _CauseExample(*place, *_token_runs(trie, parting, show))
    expected, actual = difference_runs(difference.expected[:AFTER], difference.actual[:AFTER])
    return _CauseExample(*place, difference.before[-BEFORE:], expected, actual)


def _token_runs(trie: Trie, parting: Divergence, show: _Decode) -> tuple[str, list[_TextRun], list[_TextRun]]:
    """Return the text before a parting, and the tokens of both trajectories after it."""
    at = parting.position
    ends = (int(trie.end_node[parting.other]), int(trie.end_node[parting.trajectory]))
    (before,) = show([path_tokens(trie, ends[0], max(0, at - TOKENS_BEFORE), at)])
    runs = [
        [_TextRun(text, "token") for text in show([[token] for token in path_tokens(trie, end, at, at + TOKENS_AFTER)])]
        for end in ends
    ]
    return before, runs[0], runs[1]


def difference_runs(a: str, b: str) -> tuple[list[_TextRun], list[_TextRun]]:
    """Return both texts as runs of words that are the same and that differ.

    "at 10:15 in", "at 11:20 in" -> at, 10, :, 15, in: 10 and 15 differ in the first text, 11 and 20 in the second.
    """
    first, second = _WORDS.findall(a), _WORDS.findall(b)
    runs: tuple[list[_TextRun], list[_TextRun]] = ([], [])
    for kind, i, j, k, m in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        for side, words in zip(runs, (first[i:j], second[k:m]), strict=True):
            if words:
                side.append(_TextRun("".join(words), "same" if kind == "equal" else "differs"))
    return runs

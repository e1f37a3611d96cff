"""The memory of `tracking` for one conversation: the iterations of loops over messages, and their conditions."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from treepack.tokenise.template.texts import TextChunk, TextChunks

Key = tuple[int, str]  # a namespace and its attribute
Need = tuple[Any] | tuple[int, int]  # a value, or the smallest and the largest of integers with the same outcome
Span = tuple[int, int]

UNLIMITED = sys.maxsize


@dataclass(frozen=True, slots=True)
class IterationState:
    """The state after an iteration, and the conditions under which all iterations up to it have the same outcome.

    `marks` are the spans of the generation marks up to the end of `chunk`, in order.
    The number of messages is in [`low`, `high`], and the attributes in `needs` have these values before the loop.
    `writes` are the attributes that the loop has set.
    """

    chunk: TextChunk
    marks: tuple[Span, ...]
    low: int
    high: int
    needs: dict[Key, Need]
    writes: dict[Key, Any]


@dataclass(slots=True)
class LoopMemory:
    """The iterations of one loop over messages from number `start` on, after the text and variables of `root`."""

    root: IterationState
    start: int
    variables: dict[str, Any]
    num_namespaces: int
    steps: list[IterationState] = field(default_factory=list)


@dataclass(slots=True)
class ReversedLoopMemory:
    """Results of a loop over reversed messages from a message on, by its number and the attributes that it reads."""

    variables: dict[str, Any]
    num_namespaces: int
    outcomes: dict[tuple[object, ...], dict[Key, Any]] = field(default_factory=dict)


class ConversationMemory:
    """Recorded iterations that the renderings of one conversation share."""

    def __init__(self) -> None:
        self.chunks = TextChunks()
        self.loops: dict[tuple[int, bool | None], LoopMemory] = {}
        self.reversed: dict[int, ReversedLoopMemory] = {}
        self.num_iterations = 0  # over messages, that were run

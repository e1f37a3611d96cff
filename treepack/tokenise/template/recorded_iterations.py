"""The memory of `tracking` for one conversation: the iterations of loops over messages, and their conditions."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from treepack.tokenise.template.texts import TextChunk, TextChunks

Key = tuple[int, str]  # a namespace and its attribute
Span = tuple[int, int]

UNLIMITED = sys.maxsize


class NeededValue(NamedTuple):
    """The value that an attribute must have before a loop, because an iteration has read it."""

    value: Any


_Need = NeededValue | range  # or the integers with the same outcome, if an iteration has only compared the attribute


@dataclass(frozen=True, slots=True)
class IterationState:
    """The state after an iteration, and the conditions under which all iterations up to it have the same outcome.

    `marks` are the spans of the generation marks up to the end of `chunk`, in order.
    The number of messages is in [`low`, `high`], and the attributes in `needs` meet these needs before the loop.
    `writes` are the attributes that the loop has set.
    """

    chunk: TextChunk
    marks: tuple[Span, ...]
    low: int
    high: int
    needs: dict[Key, _Need]
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
    """Outcomes of a loop over reversed messages from one of its iterations on, to the first message.

    The loop asks from the end: is the answer after the last question? A longer conversation soon meets a known place:

        messages       0    1    2    3    4
        rendering 1    <--- <--- <---              outcomes[..., 2, state] = what the iterations 2, 1, 0 write
        rendering 2              known <--- <---   messages 4 and 3 run, and leave the state in which 2 began

    The key is the start of the list, the number of the message, and the attributes that the loop may read (its state).
    """

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

"""Rendered turns to samples: the text is cut where training starts and stops, and each section is tokenised alone.

turns A, AB, XC  --samples_of_turns-->   texts AB and XC     --sections_of-->  ids and weights  --sample_of-->  samples
                 --samples_of_prompts--> texts A, AB and XC

The prompts of successive turns begin alike, so only their new text is tokenised (`PromptIds`); their ids are copied.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from treepack.tokenise.append_only import continues
from treepack.tokenise.chat_template import RenderedTurn
from treepack.tokenise.encoder import Encoder
from treepack.tokenise.template.texts import ChainedText, common
from treepack.trajectory import (
    FIRST_TOKEN_NOTE,
    MAX_INSIDE,
    Chat,
    Int32,
    Outcome,
    Outcomes,
    Skipped,
    Tokens,
    Trajectory,
    with_temperatures,
)

_SPLIT_NOTE = "split where the template rewrites earlier turns"
_TRAILING_NOTE = "messages after the last trained turn left out, because the template rewrites earlier turns"


def samples_of_turns(item: Trajectory, encoder: Encoder, turns: list[RenderedTurn], whole: str) -> Outcomes:
    """Yield the samples of a conversation; `whole` is its full rendering if messages follow the last trained turn."""
    # Turns A, AB, XC -> runs [A, AB], [XC] -> texts AB and XC, samples <id>/part-0 and <id>/part-1.
    runs = _runs_of_turns(turns)
    texts = [run[-1].text for run in runs]
    notes: tuple[str, ...] = () if len(runs) == 1 else (_SPLIT_NOTE,)
    if whole and whole.startswith(str(texts[-1])):
        texts[-1] = texts[-1].plus(whole[len(texts[-1]) :])
    elif whole:
        notes += (_TRAILING_NOTE,)
    names = [item.trajectory_id] if len(runs) == 1 else [f"{item.trajectory_id}/part-{i}" for i in range(len(runs))]
    spans = [[span for turn in run for span in _trained_spans(turn)] for run in runs]
    prompts = PromptIds(encoder)
    sections = (prompts.sections(text, spans_of_text) for text, spans_of_text in zip(texts, spans, strict=True))
    yield from _samples_of_sections(replace(item, notes=item.notes + notes), names, sections, runs)


def samples_of_prompts(item: Trajectory, encoder: Encoder, turns: list[RenderedTurn]) -> Outcomes:
    """Yield one sample for each turn, with its prompt."""
    names = [f"{item.trajectory_id}/turn-{turn.index}" for turn in turns]
    prompts = PromptIds(encoder)
    sections = (prompts.sections(turn.text, _trained_spans(turn)) for turn in turns)
    yield from _samples_of_sections(item, names, sections, [[turn] for turn in turns])


def _samples_of_sections(
    item: Trajectory, names: list[str], sections: Iterable[list[tuple[Int32, float]]], runs: list[list[RenderedTurn]]
) -> Outcomes:
    """Yield one sample per name, with the turns of one of `runs`.

    Only the first sample carries the notes of the trajectory, so they count once.
    """
    item = _in_rollout(item, len(names))
    for number, (name, sections_of_sample, turns) in enumerate(zip(names, sections, runs, strict=True)):
        notes = item.notes if number == 0 else ()
        part = None if item.rollout_part is None else item.rollout_part + number
        yield sample_of(replace(item, trajectory_id=name, notes=notes, rollout_part=part), sections_of_sample, turns)


def _in_rollout(item: Trajectory, num_samples: int) -> Trajectory:
    """Return `item` with the rollout of its samples, and the part of the first one."""
    if item.rollout_id is None:
        return item if num_samples == 1 else replace(item, rollout_id=item.trajectory_id, rollout_part=0)
    # One of several chains of calls, in two samples: part 3 -> parts 3,000,000 and 3,000,001, before part 4.
    assert item.rollout_part is not None
    return replace(item, rollout_part=item.rollout_part * MAX_INSIDE)


def _runs_of_turns(turns: list[RenderedTurn]) -> list[list[RenderedTurn]]:
    """Cut `turns` into runs in which the text of each turn continues the text of the turn before."""
    runs = [[turns[0]]]
    for turn in turns[1:]:
        if continues(runs[-1][-1], turn):
            runs[-1].append(turn)
        else:
            runs.append([turn])
    return runs


def _trained_spans(turn: RenderedTurn) -> list[tuple[int, int, float]]:
    """Return the trained spans of characters of a turn, each with the weight of the turn."""
    return [(start, end, turn.weight) for start, end in turn.spans]


class PromptIds:
    """The ids of the last prompt, of which the next one repeats the beginning."""

    def __init__(self, encoder: Encoder) -> None:
        """Start with no prompt."""
        self._encoder = encoder
        self._text = ChainedText("")
        self._ids: Int32 = np.empty(1 << 12, np.int32)
        # Characters and ids up to the end of each stretch of the prompt; they start with 0.
        self._characters, self._counts = [0], [0]

    def sections(self, text: ChainedText, spans: list[tuple[int, int, float]]) -> list[tuple[Int32, float]]:
        """Return what `sections_of` returns. The first ids are valid until the next call."""
        start = spans[0][0]
        shifted = [(a - start, b - start, weight) for a, b, weight in spans]
        return [(self._encode(text.prefix(start)), 0.0), *sections_of(self._encoder, text.slice(start), shifted)]

    def _encode(self, text: ChainedText) -> Int32:
        # The text is cut in the same places as before, as far as a cut cannot depend on different text.
        shared = common(self._text, text) - self._encoder.longest_separator
        known = max(1, bisect_right(self._characters, shared))
        del self._characters[known:], self._counts[known:]
        for stretch in self._encoder.stretches(text.slice(self._characters[-1])):
            ids = self._encoder.encode_stretch(stretch)
            count = self._counts[-1] + len(ids)
            if count > len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty(count, np.int32)])
            self._ids[self._counts[-1] : count] = ids
            self._characters.append(self._characters[-1] + len(stretch))
            self._counts.append(count)
        self._text = text
        return self._ids[: self._counts[-1]]


def sections_of(encoder: Encoder, text: str, spans: list[tuple[int, int, float]]) -> list[tuple[Int32, float]]:
    """Cut `text` at the ends of `spans` of its characters. Return the ids and the weight of each section."""
    # Spans (2, 4, w) and (6, 7, w) -> sections [0:2] 0, [2:4] w, [4:6] 0, [6:7] w, [7:] 0.
    sections: list[tuple[Int32, float]] = []
    position = 0
    for start, end, weight in spans:
        sections += [(encoder.encode(text[position:start]), 0.0), (encoder.encode(text[start:end]), weight)]
        position = end
    return [*sections, (encoder.encode(text[position:]), 0.0)]


def sample_of(item: Trajectory, sections: list[tuple[Int32, float]], turns: Iterable[RenderedTurn] = ()) -> Outcome:
    """Join the `sections` of ids into the content of `item`; trained sections become spans, without the first token.

    `turns` are the turns whose spans are the sections, if the content of `item` is a chat.
    """
    # Sections of 3, 2, 0 tokens -> bounds 0 3 5 5; weights 1, 0, 1 -> span [1, 3): position 0 is never trained.
    bounds = np.cumsum([0, *(len(ids) for ids, _ in sections)])
    spans = [
        (max(int(start), 1), int(end), weight)
        for start, end, (_, weight) in zip(bounds, bounds[1:], sections, strict=False)
        if weight > 0
    ]
    temperatures = _span_temperatures(item.content, turns, len(spans))
    trained = [(*span, value) for span, value in zip(spans, temperatures, strict=True) if span[0] < span[1]]
    first = next(((ids, weight) for ids, weight in sections if len(ids)), None)
    if first is None:
        return Skipped(item.source, "empty trajectory")
    if not trained:
        return Skipped(item.source, "no trained token")
    starts, ends, weights, values = zip(*trained, strict=True)
    content = Tokens(
        tokens=np.concatenate([ids for ids, _ in sections]),
        starts=np.array(starts, np.int32),
        ends=np.array(ends, np.int32),
        span_weights=np.array(weights, np.float64),
    )
    notes = (FIRST_TOKEN_NOTE,) if first[1] > 0 else ()
    sample = replace(item, content=content, notes=item.notes + notes)
    # Spans [1, 3) at 0.7 and [5, 6) at 1 -> 0.7 0.7 1
    return with_temperatures(sample, np.repeat(np.array(values, np.float64), content.ends - content.starts))


def _span_temperatures(content: object, turns: Iterable[RenderedTurn], num_spans: int) -> list[float]:
    """Return the temperature of each of the `num_spans` spans of `turns`, NaN if it is not known."""
    if not isinstance(content, Chat) or content.message_temperatures is None:
        return [math.nan] * num_spans
    values = [content.message_temperatures[turn.message] for turn in turns for _ in turn.spans]
    return [math.nan if value is None else value for value in values]

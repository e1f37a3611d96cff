"""Text to token ids: conversations and plain text become `Tokens`, with exact spans of what is trained.

    rendering   <|user|>Hi<|end|><|assistant|>  Hello<|end|>  <|user|>Bye<|end|><|assistant|>  Ciao<|end|>
    pieces      ------------------------------  ~~~~~~~~~~~~  ------------------------------  ~~~~~~~~~~~
    ids                 tokenised alone             alone             tokenised alone            alone

The text is cut where training starts and stops and every piece is tokenised by itself: the prompt as its sampler saw
it, the completion behind it. No span is ever looked up in the ids.

    expand="trajectory"   turns that extend each other are one sample; where the template rewrites earlier turns (drops
                          old reasoning, say) a new sample begins that trains only the turns not yet trained
    expand="turns"        one sample per assistant turn, its prompt rendered as it was then
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.ingest.chat_template import ChatTemplate, RenderedTurn, Tools
from treepack.ingest.stable_ids import with_stable_ids
from treepack.processes import batched, in_order
from treepack.trajectory import (
    FIRST_TOKEN_NOTE,
    Chat,
    Int32,
    Skipped,
    Text,
    Tokens,
    Trajectory,
    derived_group,
    prompt_messages,
    prompt_tokens,
)

EXPANSIONS = ("trajectory", "turns")
SPLIT_NOTE = "split where the template rewrites earlier turns"
TRAILING_NOTE = "messages behind the last trained turn left out, because the template rewrites earlier turns"
CLOCK_NOTE = "the chat template prints today's date"
CACHED_CHARACTERS = 1 << 26


def load_tokenizer(name: str, *, download: bool = True) -> Any:
    """The fast tokenizer of a model's name or folder, from transformers; only what is here already without `download`.

    Raises:
        TreepackError: there is none, or only a slow one.
    """
    with _quiet():
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=not download)
        except Exception as error:  # whatever a damaged folder makes foreign code raise
            reason = shorten(str(error), 200, placeholder=" ...") or type(error).__name__
            raise TreepackError(f"{name}: no tokenizer there ({reason}); give a folder or a model's name") from error
    if not tokenizer.is_fast:
        raise TreepackError(f"{name}: has a slow tokenizer only; save it as tokenizer.json")
    return tokenizer


def fingerprint(tokenizer: Any) -> dict[str, Any]:
    """What identifies a tokenizer: its name, the number of its tokens, and the sha256 of its vocabulary by id."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return {
        "name": tokenizer.name_or_path,
        "vocab_size": len(tokenizer),
        "sha256": hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest(),
    }


def tokenize(
    trajectories: Iterable[Trajectory | Skipped],
    *,
    tokenizer: Any,
    expand: str = "trajectory",
    tools: Tools = None,
    normalize_ids: bool = False,
    workers: int = 1,
) -> Iterator[Trajectory | Skipped]:
    """`trajectories` with `Tokens` content and a group, in the same order, one or more for each conversation.

    `tokenizer` is a name or folder, a tokenizer of transformers, or None if all content is token ids. `tools` are the
    schemas for conversations that bring none. `normalize_ids` numbers the ids of tool calls, UUIDs and times of
    conversations anew (`stable_ids`). With several `workers` (processes) the result is the same.

    Raises:
        TreepackError: text without a tokenizer, or a template that cannot render it or cannot be trained on.
    """
    job = Job(tokenizer, expand, tools, normalize_ids)
    if workers == 1 or tokenizer is None:
        tokenise = Tokenisation(job)
        for item in trajectories:
            yield from tokenise(item)
        return
    for found in in_order(_Batches, job.by_name(), batched(trajectories), workers=workers):
        yield from found


@dataclass(frozen=True, slots=True)
class Job:
    """How to tokenise: the arguments of `tokenize`.

    Raises:
        TreepackError: there is no such `expand`.
    """

    tokenizer: Any
    expand: str = "trajectory"
    tools: Tools = None
    normalize_ids: bool = False

    def __post_init__(self) -> None:
        """Refuse an unknown `expand`."""
        if self.expand not in EXPANSIONS:
            raise TreepackError(f"expand is '{self.expand}'; expected {' or '.join(EXPANSIONS)}")

    def by_name(self) -> Job:
        """The same for another process, which loads the tokenizer itself."""
        known = self.tokenizer is None or isinstance(self.tokenizer, str)
        return self if known else replace(self, tokenizer=self.tokenizer.name_or_path)


class _Batches:
    """Tokenises lists of trajectories."""

    def __init__(self, job: Job) -> None:
        self._tokenise = Tokenisation(job)

    def __call__(self, items: list[Trajectory | Skipped]) -> list[Trajectory | Skipped]:
        return [found for item in items for found in self._tokenise(item)]


class Tokenisation:
    """Tokenises one trajectory at a time; loads the tokenizer and the template when the first one needs them."""

    def __init__(self, job: Job) -> None:
        """Load nothing yet."""
        self._job = job
        self._encoder: Encoder | None = None
        self._template: ChatTemplate | None = None

    def __call__(self, item: Trajectory | Skipped) -> Iterator[Trajectory | Skipped]:
        """What `item` becomes: itself if it was skipped, else one or more trajectories of tokens.

        Raises:
            TreepackError: text without a tokenizer, or a template that cannot render it or cannot be trained on.
        """
        if self._job.normalize_ids and isinstance(item, Trajectory):
            item = with_stable_ids(item)
        if isinstance(item, Skipped):
            yield item
        elif isinstance(item.content, Tokens):
            group = item.group_id or derived_group(prompt_tokens(item.content))
            yield item if item.group_id else replace(item, group_id=group)
        elif isinstance(item.content, Text):
            yield self._of_text(item, item.content)
        else:
            yield from self._of_chat(item, item.content)

    def encoder(self, source: str) -> Encoder:
        """The tokenizer, for text that was read at `source`."""
        if self._encoder is None:
            tokenizer = self._job.tokenizer
            if tokenizer is None:
                raise TreepackError(f"{source}: holds text, not token ids; give a tokenizer")
            self._encoder = Encoder(load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer)
        return self._encoder

    def _of_text(self, item: Trajectory, content: Text) -> Trajectory | Skipped:
        encoder = self.encoder(item.source)
        prompt = np.concatenate([encoder.prefix, encoder.encode(content.prompt)])
        completion = encoder.encode(content.completion)
        end = encoder.tokenizer.eos_token_id
        if end is not None and (len(completion) == 0 or completion[-1] != end):
            completion = np.append(completion, np.int32(end))
        group = item.group_id or derived_group(content.prompt.encode())
        return _finished(replace(item, group_id=group), [(prompt, 0.0), (completion, 1.0)])

    def _of_chat(self, item: Trajectory, chat: Chat) -> Iterator[Trajectory | Skipped]:
        if not chat.messages:
            yield Skipped(item.source, "empty trajectory")
            return
        if not any(chat.message_weights):
            yield Skipped(item.source, "no trained token")
            return
        encoder = self.encoder(item.source)
        if self._template is None:
            self._template = ChatTemplate(encoder.tokenizer)
        tools = chat.tools or self._job.tools
        item = replace(item, group_id=item.group_id or derived_group(prompt_messages(chat, tools)))
        if self._template.reads_clock(tools):
            item = replace(item, notes=(*item.notes, CLOCK_NOTE))
        turns = self._template.turns(chat, tools=tools, source=item.source)
        if not turns:
            yield Skipped(item.source, "no trained token")
        elif self._job.expand == "turns":
            named = [f"{item.trajectory_id}/turn-{turn.index}" for turn in turns]
            yield from _named(item, named, [_pieces(encoder, turn.text, _spans(turn)) for turn in turns])
        else:
            whole = ""
            if turns[-1].message < len(chat.messages) - 1:
                whole = self._template.whole(chat, tools=tools, source=item.source)
            yield from _samples(item, encoder, turns, whole)


def _samples(
    item: Trajectory, encoder: Encoder, turns: list[RenderedTurn], whole: str
) -> Iterator[Trajectory | Skipped]:
    """The samples of a conversation; `whole` is its full rendering if messages follow the last trained turn."""
    runs = _chained(turns)
    texts = [run[-1].text for run in runs]
    notes: tuple[str, ...] = () if len(runs) == 1 else (SPLIT_NOTE,)
    if whole.startswith(texts[-1]):
        texts[-1] = whole
    elif whole:
        notes += (TRAILING_NOTE,)
    names = [item.trajectory_id] if len(runs) == 1 else [f"{item.trajectory_id}/part-{i}" for i in range(len(runs))]
    spans = [[span for turn in run for span in _spans(turn)] for run in runs]
    pieces = [_pieces(encoder, text, own) for text, own in zip(texts, spans, strict=True)]
    yield from _named(replace(item, notes=item.notes + notes), names, pieces)


def _named(
    item: Trajectory, names: list[str], pieces: list[list[tuple[Int32, float]]]
) -> Iterator[Trajectory | Skipped]:
    """One sample per name; what was noted of the trajectory is noted once, at the first."""
    for number, (name, own) in enumerate(zip(names, pieces, strict=True)):
        notes = item.notes if number == 0 else ()
        yield _finished(replace(item, trajectory_id=name, notes=notes), own)


def _chained(turns: list[RenderedTurn]) -> list[list[RenderedTurn]]:
    """`turns` in runs in which each one's text continues the one before."""
    runs = [[turns[0]]]
    for turn in turns[1:]:
        before = runs[-1][-1].text
        if turn.text.startswith(before) and turn.spans[0][0] >= len(before):
            runs[-1].append(turn)
        else:
            runs.append([turn])
    return runs


def _spans(turn: RenderedTurn) -> list[tuple[int, int, float]]:
    return [(start, end, turn.weight) for start, end in turn.spans]


def _pieces(encoder: Encoder, text: str, spans: list[tuple[int, int, float]]) -> list[tuple[Int32, float]]:
    """The ids of `text` cut at the ends of `spans` of its characters, and the weight of each piece."""
    pieces: list[tuple[Int32, float]] = []
    done = 0
    for start, end, weight in spans:
        pieces += [(encoder.encode(text[done:start]), 0.0), (encoder.encode(text[start:end]), weight)]
        done = end
    return [*pieces, (encoder.encode(text[done:]), 0.0)]


def _finished(item: Trajectory, pieces: list[tuple[Int32, float]]) -> Trajectory | Skipped:
    """`item` with its `pieces` of ids joined; the trained ones become spans, but for the first token."""
    bounds = np.cumsum([0, *(len(ids) for ids, _ in pieces)])
    trained = [
        (max(int(start), 1), int(end), weight)
        for start, end, (_, weight) in zip(bounds, bounds[1:], pieces, strict=False)
        if weight > 0 and end > max(start, 1)
    ]
    first = next(((ids, weight) for ids, weight in pieces if len(ids)), None)
    if first is None:
        return Skipped(item.source, "empty trajectory")
    if not trained:
        return Skipped(item.source, "no trained token")
    starts, ends, weights = zip(*trained, strict=True)
    content = Tokens(
        tokens=np.concatenate([ids for ids, _ in pieces]),
        starts=np.array(starts, np.int32),
        ends=np.array(ends, np.int32),
        span_weights=np.array(weights, np.float64),
    )
    notes = (FIRST_TOKEN_NOTE,) if first[1] > 0 else ()
    return replace(item, content=content, notes=item.notes + notes)


class Encoder:
    """A tokenizer without special additions, which remembers the ids of the stretches between special tokens.

    Prompts of successive turns repeat nearly everything, so nearly every stretch is found again. Splitting is done
    only where a probe shows that it does not change the ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Probe the special tokens of a fast tokenizer of transformers."""
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special = _splitting_tokens(tokenizer)
        longest_first = sorted(self._special, key=lambda token: (-len(token), token))
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._cache: OrderedDict[str, Int32] = OrderedDict()
        self._cached = 0
        begin = self._backend.encode("", add_special_tokens=True).ids
        is_begin = begin == [tokenizer.bos_token_id]
        self.prefix: Int32 = np.array(begin if is_begin else [], np.int32)

    def encode(self, text: str) -> Int32:
        """The ids of `text` alone, int32; O(length)."""
        stretches = [text] if self._pattern is None else self._pattern.split(text)
        found = [self._ids(stretch) for stretch in stretches if stretch]
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    def _ids(self, stretch: str) -> Int32:
        if (special := self._special.get(stretch)) is not None:
            return special
        if (known := self._cache.get(stretch)) is not None:
            self._cache.move_to_end(stretch)
            return known
        ids = np.array(self._backend.encode(stretch, add_special_tokens=False).ids, np.int32)
        self._cache[stretch] = ids
        self._cached += len(stretch)
        while self._cached > CACHED_CHARACTERS:
            oldest, _ = self._cache.popitem(last=False)
            self._cached -= len(oldest)
        return ids


def _splitting_tokens(tokenizer: Any) -> dict[str, Int32]:
    """The special tokens at which text may be split before it is tokenised, with their ids; empty if it may not."""
    special = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    if any(token.lstrip or token.rstrip or token.normalized or token.single_word for token in special.values()):
        return {}

    def ids(text: str) -> list[int]:
        return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    for i, token in special.items():
        for before, after in (("Hello world", "\nnext line"), ("end. \n", " word"), ("", "word")):
            if ids(before + token.content + after) != [*ids(before), i, *ids(after)]:
                return {}
    return {token.content: np.array([i], np.int32) for i, token in special.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the warnings that transformers gives when it is imported without torch."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)

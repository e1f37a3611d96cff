"""Every chat template of trl, with a conversation of every format and of real rollouts: right spans or a skip.

Each text of a conversation is replaced by a marker, so that a trained token shows the message that it comes from. See
`support.template_oracle`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support import real_templates
from support.conversations import Conversation, real_conversations, samples_of_formats
from support.paths import REAL
from support.template_oracle import faults, faults_of_prompt, marked
from treepack.tokenise.file_tokenizer import FileTokenizer
from treepack.tokenise.tokenization import (
    TokenisationJob,
    TrajectoryTokeniser,
    fingerprint,
    load_tokenizer,
    read_tokenizer,
)
from treepack.trajectory import Skipped, Trajectory

# `make test` has one template of each kind: thoughts kept or dropped, tools, channels, merged roles. The others are in
# the slow group.
USUAL = frozenset(
    "qwen2_5 qwen3 qwen3_6 llama3_1 gptoss gemma3 gemma4 deepseekv3 deepseek_r1_distill glm4moe phi3_5".split()
)
NAMES = [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in real_templates.names()]
# The share that may be skipped for families that agents are trained with; no other test would fail if a template skips
# more. Not Llama 3.1: its template prints either the text or the call of a turn, and refuses several calls.
MAX_SKIPPED = dict.fromkeys("qwen2_5 qwen3 qwen3_5_think qwen3_6 qwen3_8 deepseekv3 glm4moe".split(), 0.02)
REAL_CONVERSATIONS = 3  # of each source
PROMPT_MESSAGES = 6


@cache
def conversations() -> list[Conversation]:
    return [
        replace(one, item=replace(one.item, content=marked(one.chat)))
        for one in [*samples_of_formats(), *real_conversations(REAL_CONVERSATIONS)]
    ]


class Samples:
    """Samples of one template, whose forms are probed once for all conversations with equal tools, as in a build."""

    def __init__(self, reader: FileTokenizer) -> None:
        self._reader = reader
        self._tokenisers: dict[str, TrajectoryTokeniser] = {}

    def __call__(self, one: Conversation, expand: str) -> list[Trajectory | Skipped]:
        key = json.dumps([expand, one.tools])
        if key not in self._tokenisers:
            job = TokenisationJob(self._reader, expand=expand, tools=one.tools)
            self._tokenisers[key] = TrajectoryTokeniser(job)
        (done,) = self._tokenisers[key].record([one.item])
        return done[1]


def wrong(tokenizer: Any, samples: Samples, one: Conversation, whole: list[Trajectory | Skipped]) -> Iterator[str]:
    yield from faults(tokenizer, one.chat, whole, one.schemas)
    # The prompts of the first turns are enough, and rendering every turn of a long conversation takes most of the time.
    short = replace(one, item=replace(one.item, content=marked(one.chat, limit=PROMPT_MESSAGES)))
    for turn in samples(short, "turns"):
        if isinstance(turn, Trajectory):
            yield from faults_of_prompt(tokenizer, short.chat, turn, one.schemas)


@pytest.mark.parametrize("name", NAMES)
def test_trained_tokens_are_what_the_assistant_wrote_or_the_conversation_is_skipped(name: str, tmp_path: Path) -> None:
    folder = real_templates.save(name, tmp_path)
    # The oracle decodes and renders with transformers; the samples are made without it.
    tokenizer, reader = load_tokenizer(folder), read_tokenizer(folder)
    assert isinstance(reader, FileTokenizer)
    assert fingerprint(reader) == fingerprint(tokenizer)
    faulty, skipped, samples = list[tuple[str, str]](), list[Skipped](), Samples(reader)
    for one in conversations():
        whole = samples(one, "trajectory")
        skipped += [each for each in whole if isinstance(each, Skipped)]
        faulty += [(one.item.source, fault) for fault in wrong(tokenizer, samples, one, whole)]
    assert faulty == []
    assert len(skipped) <= MAX_SKIPPED.get(name, 1) * len(conversations()), [each.reason for each in skipped]


def test_the_matrix_has_conversations_of_every_source() -> None:
    assert len({one.source for one in conversations()}) >= 25
    if not REAL.is_dir():
        pytest.skip(f"the real rollouts are not at {REAL}")
    assert len({one.source for one in real_conversations(1)}) == 3


def test_merges_of_a_vocabulary_give_the_ids_of_its_ranks() -> None:
    ranks = {bytes([b]): b for b in range(256)}
    ranks |= {b"ab": 256, b"abc": 257, b"bc": 258, b"abcabc": 259, b"  ": 260, "\u00e9".encode(): 261}
    vocabulary, merges = real_templates._merges(ranks)
    assert len(vocabulary) == len(ranks)
    assert [(a, b) for a, b in merges] == [("a", "b"), ("ab", "c"), ("b", "c"), ("abc", "abc"), ("Ġ", "Ġ"), ("Ã", "©")]

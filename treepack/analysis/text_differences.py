"""What kind of difference two texts have that were to begin alike: the causes of lost sharing.

    expected  "... tool call_8f2a: ok"      found  "... tool call_91bc: ok"      =>  random ids

Both texts start with the same tokens, some context, and go on behind the parting; each is either whole up to where it
was to be shared, or cut there. A cause is named if nothing but it tells the texts apart: they are equal, or one is the
beginning of the other, once whitespace, ids or reasoning are taken out. What is left is an edit of a prompt, where most
words behind the parting are the same; another prompt, where they are not, as where a simulated user speaks; or, between
the calls of a rollout, a history that was rewritten: compacted, or its observations shortened.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher

RETOKENISED, WHITESPACE, IDS, TEMPLATE = "retokenisation", "whitespace", "random ids", "template"
EDITED, OTHER, REWRITTEN = "prompt edit", "other prompt", "rewritten history"
CAUSES = (RETOKENISED, WHITESPACE, IDS, TEMPLATE, EDITED, OTHER, REWRITTEN)

DAY = r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?,? )?"
MONTH = r"(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]*\.?"
ID = re.compile(
    "|".join(
        (
            r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?",
            rf"{DAY}(?:\d{{1,2}} {MONTH} \d{{4}}|{MONTH} \d{{1,2}}, \d{{4}})",
            r"\b\d{1,2}/\d{1,2}/\d{4}\b|\d{4}\u5e74\d{1,2}\u6708\d{1,2}\u65e5",
            r"\b\d{1,2}:\d{2}:\d{2}(?:\.\d+)?\b",
            # A digit, or capitals among small letters, tell an id from run_tests and from requests.
            r"\b(?:call|toolu|chatcmpl|msg|resp|run|req|fc|rs)(?=[A-Za-z_-]*\d|[_-][a-z]*[A-Z]\w*[a-z])"
            r"[_-]?[A-Za-z0-9_-]{5,}",
            r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b",
            r"\b0x[0-9a-fA-F]{4,}\b",
            r"\b(?=[a-zA-Z0-9]*\d[a-zA-Z])[a-zA-Z0-9]{9}\b",
            r"\b(?=[0-9a-zA-Z]*\d[a-zA-Z])[0-9a-zA-Z]{16,}\b",
            r"\b1[5-9]\d{8}(?:\.\d+|\d{3})?\b",
        )
    )
)
REASONING = re.compile(
    r"<think>.*?(?:</think>\s*|\Z)|\A(?:(?!<think>).)*?</think>\s*|\[THINK\].*?(?:\[/THINK\]\s*|\Z)"
    r"|<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|><\|start\|>assistant|\Z)",
    re.DOTALL,
)
THINK = re.compile(r"(?:<think>.*?)?</think>\s*", re.DOTALL)  # DeepSeek's templates keep the end of what they drop
UNSPACED = r"\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef"  # a word each: no blanks part them
WORDS = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
WORD = re.compile(r"\S{0,24}\Z")
SPACE = re.compile(r"\s+")
SHOWN_BEFORE, SHOWN = 40, 80
SIMILAR = 0.7
LONGEST_CHARACTER, LONGEST_ID = 4, 64


@dataclass(frozen=True, slots=True)
class Difference:
    """A cause, and the texts at the parting: what comes `before` it, what was `expected` and what was `found`."""

    cause: str
    before: str
    expected: str
    found: str

    @property
    def texts(self) -> dict[str, str]:
        return {"before": self.before, "expected": self.expected, "found": self.found}


def classify(expected: str, found: str, *, is_call: bool, whole: tuple[bool, bool]) -> Difference:
    """What tells `found` from `expected`.

    `is_call`: it was to go on with the call before, so what differs is its history and not the prompt of a sibling.
    `whole` says of each text whether it reaches as far as it was to be shared; else it is cut.
    """
    at = _common_length(expected, found)
    word = at - len(WORD.findall(expected[:at])[0])
    shown = (expected[max(0, word - SHOWN_BEFORE) : word], expected[word : word + SHOWN], found[word : word + SHOWN])
    if _alike(expected, found, whole=whole, is_call=is_call, tail=LONGEST_CHARACTER):
        return Difference(RETOKENISED, *shown)
    tests: tuple[tuple[str, Callable[[str], str]], ...] = (
        (WHITESPACE, _without_space),
        (IDS, _without_ids),
        (TEMPLATE, _without_reasoning),
        (IDS, lambda text: _without_space(_without_ids(text))),
        (TEMPLATE, lambda text: _without_space(_without_reasoning(text))),
        (TEMPLATE, lambda text: _without_space(THINK.sub("", text))),
    )
    parts_id = _in_id(expected, at) and _in_id(found, at)
    for cause, strip in tests:
        if (cause != IDS or parts_id) and _alike(
            strip(expected), strip(found), whole=whole, is_call=is_call, tail=LONGEST_ID
        ):
            return Difference(cause, *shown)
    if is_call:
        return Difference(REWRITTEN, *shown)
    return Difference(EDITED if _kept_words(expected[at:], found[at:]) >= SIMILAR else OTHER, *shown)


def _in_id(text: str, at: int) -> bool:
    """Whether an id stands at `at`: the search is cheap, and most texts part nowhere near one."""
    start = max(0, at - LONGEST_ID)
    return any(found.start() <= at - start <= found.end() for found in ID.finditer(text[start : at + LONGEST_ID]))


def _kept_words(a: str, b: str) -> float:
    """Share of the words of the shorter text that the other has too, in the same order; 1 where it has none."""
    first, second = WORDS.findall(a), WORDS.findall(b)
    blocks = SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    shorter = min(len(first), len(second))
    return sum(block.size for block in blocks) / shorter if shorter else 1.0


def _common_length(a: str, b: str) -> int:
    size = min(len(a), len(b))
    return next((i for i in range(size) if a[i] != b[i]), size)


def _alike(a: str, b: str, *, whole: tuple[bool, bool], is_call: bool, tail: int) -> bool:
    """Whether the texts are equal, or agree up to where one is cut; a call has only to begin with what was expected.

    `tail` characters before a cut are not looked at: it can go through a character, an id or a tag.
    """
    if all(whole):
        return b.startswith(a) if is_call else a == b
    ends = [len(text) if complete else len(text) - tail for text, complete in zip((a, b), whole, strict=True)]
    size = min(ends)
    return size > 0 and a[:size] == b[:size]


def _without_space(text: str) -> str:
    return SPACE.sub("", text)


def _without_ids(text: str) -> str:
    return ID.sub("#", text)


def _without_reasoning(text: str) -> str:
    return REASONING.sub("", text).replace("<|return|>", "<|end|>")  # how gpt-oss ends an answer, and an earlier one

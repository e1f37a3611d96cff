"""Classify why two texts that should share a prefix diverge: the causes of lost sharing.

    expected  "... tool call_8f2a: ok"      actual  "... tool call_91bc: ok"      =>  random ids

Both texts start with the same tokens, some context, and continue after the parting. A text is whole if it contains
everything that should be shared, else it is cut. A cause is named if it is the only difference: without whitespace, ids
or reasoning, the texts are equal, or one is the beginning of the other. All other differences are

    prompt edit         most words after the parting are the same
    other prompt        they are not, for example if a simulated user wrote it
    rewritten history   between the calls of a rollout: a compacted history, or shortened observations
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher

RETOKENISED, _WHITESPACE, _IDS, _TEMPLATE = "retokenisation", "whitespace", "random ids", "template"
_EDITED, _OTHER, _REWRITTEN = "prompt edit", "other prompt", "rewritten history"

# The ids, dates and times that serving engines, agents and prompts contain; each pattern would rather miss an id than
# take a word for one, because a cause may only be named if nothing else differs.
_DAY = r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?,? )?"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]*\.?"
_ID = re.compile(
    "|".join(
        (
            # 2026-03-01, 2026-03-01T12:00:01.5Z, 2026-03-01 12:00+02:00
            r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?",
            # Monday, March 3, 2025; 3 August 2025
            rf"{_DAY}(?:\d{{1,2}} {_MONTH} \d{{4}}|{_MONTH} \d{{1,2}}, \d{{4}})",
            r"\b\d{1,2}/\d{1,2}/\d{4}\b|\d{4}\u5e74\d{1,2}\u6708\d{1,2}\u65e5",
            r"\b\d{1,2}:\d{2}:\d{2}(?:\.\d+)?\b",
            # call_8f2a91. A digit, or capitals among small letters, distinguish an id from run_tests and requests.
            r"\b(?:call|toolu|chatcmpl|msg|resp|run|req|fc|rs)(?=[A-Za-z_-]*\d|[_-][a-z]*[A-Z]\w*[a-z])"
            r"[_-]?[A-Za-z0-9_-]{5,}",
            r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b",
            r"\b0x[0-9a-fA-F]{4,}\b",
            # Nine characters, as Mistral's ids of tool calls, or at least 16; in both a letter follows a digit.
            r"\b(?=[a-zA-Z0-9]*\d[a-zA-Z])[a-zA-Z0-9]{9}\b",
            r"\b(?=[0-9a-zA-Z]*\d[a-zA-Z])[0-9a-zA-Z]{16,}\b",
            # Seconds since 1970, from 2017 to 2033, perhaps with a fraction or as milliseconds.
            r"\b1[5-9]\d{8}(?:\.\d+|\d{3})?\b",
        )
    )
)
_REASONING = re.compile(
    r"<think>.*?(?:</think>\s*|\Z)|\A(?:(?!<think>).)*?</think>\s*|\[THINK\].*?(?:\[/THINK\]\s*|\Z)"
    r"|<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|><\|start\|>assistant|\Z)",
    re.DOTALL,
)
_THINK = re.compile(r"(?:<think>.*?)?</think>\s*", re.DOTALL)  # DeepSeek's templates drop reasoning, not its end tag
_UNSPACED = r"\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef"  # each character is a word: there are no blanks
_WORDS = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_WORD = re.compile(r"\S{0,24}\Z")
_SPACE = re.compile(r"\s+")
_SHOWN_BEFORE, _SHOWN = 40, 80  # characters of an example before and after the parting: a line of a terminal
_SIMILAR = 0.7  # minimum share of common words of two versions of one prompt
# Characters before a cut that are ignored: a cut may split a character of four bytes, or an id or a tag.
_LONGEST_CHARACTER, _LONGEST_ID = 4, 64


@dataclass(frozen=True, slots=True)
class TextDifference:
    """A cause, and the texts at the parting: the common text `before` it, the `expected` and the `actual` text."""

    cause: str
    before: str
    expected: str
    actual: str

    @property
    def texts(self) -> dict[str, str]:
        """The words around the parting, short enough for a line of a terminal each."""
        return {
            "before": self.before[-_SHOWN_BEFORE:],
            "expected": self.expected[:_SHOWN],
            "found": self.actual[:_SHOWN],
        }


def classify_difference(expected: str, actual: str, *, is_call: bool, whole: tuple[bool, bool]) -> TextDifference:
    """Return the cause of the difference between two texts, and the texts before and after the parting.

    Args:
        expected: text of the trajectory that was to be shared.
        actual: text of the trajectory that parts from it.
        is_call: the actual text should have continued the call before it, so its history differs, not its prompt.
        whole: for each text, whether it contains everything that should be shared; else it is cut.
    """
    at = _common_length(expected, actual)
    # Examples begin with a whole word: "is not idented", "is not indented": at 8 -> word 7
    word = at - len(_WORD.findall(expected[:at])[0])
    shown = (expected[:word], expected[word:], actual[word:])
    if _equal_up_to_cut(expected, actual, whole=whole, is_call=is_call, tail=_LONGEST_CHARACTER):
        return TextDifference(RETOKENISED, *shown)
    # Single causes first, then with whitespace, because removing an id or reasoning may leave blanks.
    tests: tuple[tuple[str, Callable[[str], str]], ...] = (
        (_WHITESPACE, _strip_space),
        (_IDS, _strip_ids),
        (_TEMPLATE, _strip_reasoning),
        (_IDS, lambda text: _strip_space(_strip_ids(text))),
        (_TEMPLATE, lambda text: _strip_space(_strip_reasoning(text))),
        (_TEMPLATE, lambda text: _strip_space(_THINK.sub("", text))),
    )
    parts_id = _in_id(expected, at) and _in_id(actual, at)
    for cause, strip in tests:
        if (cause != _IDS or parts_id) and _equal_up_to_cut(
            strip(expected), strip(actual), whole=whole, is_call=is_call, tail=_LONGEST_ID
        ):
            return TextDifference(cause, *shown)
    if is_call:
        return TextDifference(_REWRITTEN, *shown)
    return TextDifference(_EDITED if _common_word_share(expected[at:], actual[at:]) >= _SIMILAR else _OTHER, *shown)


def _in_id(text: str, at: int) -> bool:
    """Return whether `at` is inside an id. The search is cheap, and most texts part far from any id."""
    start = max(0, at - _LONGEST_ID)
    return any(match.start() <= at - start <= match.end() for match in _ID.finditer(text[start : at + _LONGEST_ID]))


def _common_word_share(a: str, b: str) -> float:
    """Return the share of the shorter text's words that the other contains in the same order; 1 if it has none."""
    # "a b c d" and "a x c" -> words a and c of three -> 2 / 3
    first, second = _WORDS.findall(a), _WORDS.findall(b)
    blocks = SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    shorter = min(len(first), len(second))
    return sum(block.size for block in blocks) / shorter if shorter else 1.0


def _common_length(a: str, b: str) -> int:
    size = min(len(a), len(b))
    return next((i for i in range(size) if a[i] != b[i]), size)


def _equal_up_to_cut(a: str, b: str, *, whole: tuple[bool, bool], is_call: bool, tail: int) -> bool:
    """Return whether the texts are equal, or equal up to a cut. For a call, the actual text may also continue.

    `tail` characters before a cut are ignored, because the cut may split a character, an id or a tag.
    """
    if all(whole):
        return b.startswith(a) if is_call else a == b
    ends = [len(text) if complete else len(text) - tail for text, complete in zip((a, b), whole, strict=True)]
    size = min(ends)
    return size > 0 and a[:size] == b[:size]


def _strip_space(text: str) -> str:
    return _SPACE.sub("", text)


def _strip_ids(text: str) -> str:
    return _ID.sub("#", text)


def _strip_reasoning(text: str) -> str:
    return _REASONING.sub("", text).replace("<|return|>", "<|end|>")  # gpt-oss: end of the last and of other answers

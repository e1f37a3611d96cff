"""Choices among words, of commands and of option values, with a guess for a word that is not among them.

--loss dr-grpo        dr_grpo: - and _ are the same in a value
--loss grop           'grop' is not one of 'sft', 'ppo', ... Did you mean 'grpo'?
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import click


class WordChoice(click.Choice[str]):
    """A choice among words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the choice that `value` means; wrong usage if there is none."""
        words = {str(each).replace("_", "-"): str(each) for each in self.choices}
        word = words.get(str(value).replace("_", "-"))
        if word is None:
            listed = ", ".join(map(repr, words.values()))
            self.fail(f"{value!r} is not one of {listed}.{guess(str(value), words.values())}", param, ctx)
        return word


def guess(word: str, words: Iterable[str]) -> str:
    """Return a question with the nearest of `words`; nothing if none is near."""
    word, known = word.replace("_", "-"), list(words)
    # Letters in a wrong order: "gpro" is nearer to "gspo" by its common substrings, and means "grpo".
    near = [each for each in known if sorted(each) == sorted(word)] or get_close_matches(word, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""

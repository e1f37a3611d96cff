"""Types of options that count tokens or bytes, and the option of memory.

8192, 8_192 and 8k are the same number of tokens; 1073741824, 1024M and 1G are the same number of bytes.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import click

from treepack.option_fields import parse_count
from treepack.pack.options import MAX_CAPACITY


class TokenCount(click.ParamType[int]):
    """A number of tokens from 1 to `MAX_CAPACITY`, as an integer or with k or m."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse `value`; wrong usage if it is not a number of tokens."""
        number = value if isinstance(value, int) else parse_count(str(value))
        if number is None:
            self.fail(f"{value!r} is not a number of tokens such as 8192 or 8k", param, ctx)
        if not 1 <= number <= MAX_CAPACITY:
            self.fail(f"{value!r} is not between 1 and {MAX_CAPACITY:,} tokens", param, ctx)
        return number


class TokenCounts(click.ParamType[tuple[int, ...]]):
    """Comma-separated numbers of tokens."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parse `value`; wrong usage if any part is not a number of tokens."""
        parts = value if isinstance(value, tuple) else str(value).split(",")
        return tuple(TokenCount().convert(part, param, ctx) for part in parts)


class _TokensOrWord(click.ParamType[Any]):
    """A number of tokens, or one of some words, each of which has a value."""

    def __init__(self, example: str, **words: str | None) -> None:
        self.example, self.words = example, words
        self.name = "|".join(["N", *words])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str | None:
        """Parse `value`; wrong usage if it is neither a word nor a number of tokens."""
        if value in self.words:
            return self.words[value]
        if not isinstance(value, int) and parse_count(str(value)) is None:
            words = " or ".join(self.words)
            self.fail(f"{value!r} is neither a number of tokens such as {self.example}, nor {words}", param, ctx)
        return TokenCount().convert(value, param, ctx)


class _LayerCount(click.ParamType[Any]):
    """A number of layers, `all` or `auto`."""

    name = "N|all|auto"
    pattern, meaning = "all|auto|[0-9]+", "a number of layers, all or auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Parse `value`; wrong usage if it is neither a word nor a number."""
        if not re.fullmatch(self.pattern, str(value)):
            self.fail(f"{value!r} is not {self.meaning}", param, ctx)
        return int(value) if str(value).isdecimal() else str(value)


class RankCount(_LayerCount):
    """A number of ranks or `auto`."""

    name = "R|auto"
    pattern, meaning = "auto|[1-9][0-9]*", "a number of ranks or auto"


class Bounds(click.ParamType[tuple[float, float]]):
    """Two numbers, the lower one first."""

    name = "LOW,HIGH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """Parse `value`; wrong usage if it is not two numbers."""
        if isinstance(value, tuple):
            return value
        try:
            low, high = (float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not two numbers such as 0.5,2", param, ctx)
        return low, high


class Size(click.ParamType[int]):
    """A number of bytes, with one of the suffixes K, M and G for 1024, 1024^2 and 1024^3."""

    name = "BYTES"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse `value`; wrong usage if it is not an integer with or without a suffix."""
        digits = str(value).upper().removesuffix("B")
        factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(digits[-1:], 1)
        try:
            return min(int(digits[:-1] if factor > 1 else digits) * factor, sys.maxsize - 1)
        except ValueError:
            self.fail(f"{value!r} is not a number of bytes such as 500M or 2G", param, ctx)


def _positive(context: click.Context, option: click.Parameter, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise click.BadParameter(f"{value} is not a size of memory; give for example 4G", context, option)
    return value


memory_option = click.option(
    "--memory",
    type=Size(),
    callback=_positive,
    help="Memory to use; larger data is kept in temporary files, beside the output if there is one. The result is the "
    "same. Default: half of the memory of the machine or container; suffixes K, M and G.",
)
"""Adds --memory to a command, which receives `memory: int | None`, in bytes."""


KINDS: dict[str, click.ParamType[Any]] = {
    "capacity": TokenCount(),
    "carry": _TokensOrWord("8192 or 8k", auto="auto", off=None),
    "pass_tokens": _TokensOrWord("32768 or 32k", auto="auto"),
    "checkpoint_layers": _LayerCount(),
    "loss_chunk": _TokensOrWord("2048 or 2k", auto="auto"),
    "max_record_size": Size(),
    "importance_mask": Bounds(),
    "betas": Bounds(),
}
"""Types of the fields of option classes that are more than a number or a word, by the names of the fields."""

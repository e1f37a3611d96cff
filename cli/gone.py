"""Options that are gone, and what to use instead. A command that gets one ends with this sentence and status 2."""

from __future__ import annotations

import click

_CAPACITY = "pack takes 16k, 64k or the next power of two; for another capacity, stats TRIE compares them"
_MEMORY = "stats TRIE --device says what fits a device"
_PARTS = (
    "pack reads a trie of any number of tokens in one process, so leave it out; if its nodes do not fit, build several "
    "tries from fewer files, pack each, and give all of them to train"
)

GONE = {
    "build-trie --partitions": "build-trie --ray takes shares of whole files, so leave it out, and give many files",
    "pack --device": f"{_CAPACITY}, and {_MEMORY}",
    "pack --partitions": _PARTS,
    "pack --ray": _PARTS,
    "prepare --device": f"{_CAPACITY}, and {_MEMORY}",
    "stats --carry": "stats takes the largest pieces that fit; train chooses the size itself, or takes --carry N",
}


def replacement(command: str, option: str) -> str | None:
    """Return what to use instead of an option that `command` does not have, if it is known."""
    remedy = GONE.get(f"{command} {option}")
    return None if remedy is None else f"is gone; {remedy}"


def refuse_gone(error: click.NoSuchOption, command: str | None) -> None:
    """Raise the sentence of an option of `command` if the one of `error` is gone.

    Raises:
        UsageError: naming what to use instead.
    """
    if (answer := replacement(command or "", error.option_name)) is not None:
        raise click.UsageError(f"{error.option_name} {answer}", error.ctx) from error

"""The objects inside of a manifest.json; `manifest.Manifest` has them all."""

from __future__ import annotations

from typing import Any, TypedDict


class FileEntry(TypedDict):
    """One Parquet part: its rows, its size and its sha256 in hex."""

    name: str
    rows: int
    bytes: int
    sha256: str


class TokenizerEntry(TypedDict):
    """The tokenizer that made the token ids; `sha256` is that of its vocabulary, see `tokenization.fingerprint`."""

    name: str
    vocab_size: int
    sha256: str


class TemplateEntry(TypedDict):
    """The chat template that rendered the conversations; `sha256` is that of its text, see `saved_template`.

    `text` is an object with the entries default and tool_use if conversations with tools have a template of their own.
    """

    name: str
    sha256: str
    text: str | dict[str, str]


class TrieEntry(TypedDict):
    """The trie that a directory was made from; `sha256` is that of its manifest.json."""

    path: str
    sha256: str


class InputEntry(TypedDict):
    """The raw input; see `InputHash` for the hash."""

    sha256: str
    num_files: int


class ReadingEntry(TypedDict):
    """The reading of the rollouts of a trie, so that a later build can continue it.

    `log` are the numbers and names of a `ReadLog` beside `counts`, and `files` the sha256 of each input file.
    """

    log: dict[str, Any]
    files: list[str]

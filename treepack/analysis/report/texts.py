"""The text of every node, which parts of it are trained, and how much of it a page may hold.

    Trie, decode --node_texts--> Texts: chunks of JSON, each for a run of consecutive nodes

A text is a list of pieces, trained and untrained in turn, the first one untrained and perhaps empty. Where a limit is
set, every node keeps as many of its first tokens as all can have alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from treepack.pack.weights import times_trained
from treepack.trajectory import Int32, Int64
from treepack.trie.trie import Trie

CHUNK_CHARACTERS = 1 << 18

Decode = Callable[[list[list[int]]], list[str]]


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of all nodes. `chunks[i]` is JSON, a list of pieces for each node from `first_node[i]` on.

    `kept` is the most tokens that a node shows, None if all are there; `tokens_left_out` counts what is not.
    """

    chunks: list[bytes]
    first_node: list[int]
    kept: int | None
    tokens_left_out: int


def ids_as_text(sequences: list[list[int]]) -> list[str]:
    """Token ids themselves, where no tokenizer is known."""
    return ["".join(f"{token} " for token in ids) for ids in sequences]


def decoder_of(tokenizer: Any) -> Decode:
    """Text of token ids, special tokens included.

    Some decoders drop the space before the first word of what they are given, so all are given a letter before it.
    """
    backend = tokenizer.backend_tokenizer
    lead = backend.encode("a", add_special_tokens=False).ids[-1:]
    letter = backend.decode(lead, skip_special_tokens=False)

    def decode(sequences: list[list[int]]) -> list[str]:
        found = backend.decode_batch([lead + ids for ids in sequences], skip_special_tokens=False)
        return [
            text[len(letter) :] if text.startswith(letter) else backend.decode(ids, skip_special_tokens=False)
            for text, ids in zip(found, sequences, strict=True)
        ]

    return decode


def node_texts(trie: Trie, decode: Decode, *, limit: int) -> Texts:
    """Decode at most `limit` tokens of the nodes, each node's first ones.

    A token is trained if any trajectory trains it. One call of `decode` for each chunk.
    """
    sizes = trie.node_length
    most = _most_alike(sizes, limit)
    kept = np.minimum(sizes, most)
    trained = times_trained(trie) > 0
    chunks, first_node = [], []
    for a, b in _runs(kept):
        first_node.append(a)
        pieces = list(_pieces(trie, kept, trained, a, b))
        texts = iter(decode([ids for node in pieces for ids in node if ids]))
        nodes = [[next(texts) if ids else "" for ids in node] for node in pieces]
        chunks.append(json.dumps(nodes, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"))
    left_out = int((sizes - kept).sum())
    return Texts(chunks, first_node, most if left_out else None, left_out)


def _most_alike(sizes: Int64, limit: int) -> int:
    """The greatest number such that the nodes, each cut to so many tokens, have at most `limit` together."""
    low, high = 0, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.minimum(sizes, middle).sum()) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def _runs(kept: Int64) -> Iterator[tuple[int, int]]:
    """Runs of consecutive nodes of about `CHUNK_CHARACTERS`, at four characters a token."""
    before = np.concatenate([[0], np.cumsum(kept)])
    start = 0
    while start < len(kept):
        end = int(np.searchsorted(before, before[start] + CHUNK_CHARACTERS // 4))
        yield start, (end := min(max(end, start + 1), len(kept)))
        start = end


def _pieces(trie: Trie, kept: Int64, trained: np.ndarray[Any, np.dtype[np.bool_]], a: int, b: int) -> Iterator[Any]:
    """For each node the token ids of its pieces, untrained and trained in turn."""
    starts = trie.node_start[a:b].tolist()
    for start, size in zip(starts, kept[a:b].tolist(), strict=True):
        flags, tokens = trained[start : start + size], trie.tokens[start : start + size]
        cuts = np.flatnonzero(flags[1:] != flags[:-1]) + 1
        yield [[]] * int(bool(size and flags[0])) + _split(tokens, cuts)


def _split(tokens: Int32, cuts: Int64) -> list[list[int]]:
    bounds = [0, *cuts.tolist(), len(tokens)]
    ids = tokens.tolist()
    return [ids[i:j] for i, j in pairwise(bounds)]

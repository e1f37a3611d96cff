"""The text of every node, cut at the bounds of its trained parts, within a limit for the page.

    Trie, decode --node_texts--> Texts: chunks of JSON, each for a run of consecutive nodes

A text is a list of pieces, untrained and trained in turn; the first one is untrained and may be empty. If the limit is
too small for all tokens, every node keeps its first tokens, the same maximum number for all nodes.
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

CHUNK_CHARACTERS = 1 << 18  # 256 kB: the page decompresses a whole chunk to show one of its nodes
CHARACTERS_PER_TOKEN = 4  # of English and code, roughly

Decode = Callable[[list[list[int]]], list[str]]


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of all nodes. `chunks[i]` is JSON, a list of pieces for each node from `first_node[i]` on.

    `kept` is the maximum number of tokens of a node, None if no token is left out; `tokens_left_out` counts the others.
    """

    chunks: list[bytes]
    first_node: list[int]
    kept: int | None
    tokens_left_out: int


def ids_as_text(sequences: list[list[int]]) -> list[str]:
    """Return token ids as text, for use without a tokenizer."""
    return ["".join(f"{token} " for token in ids) for ids in sequences]


def decoder_of(tokenizer: Any) -> Decode:
    """Return a function from token ids to text, with special tokens written out.

    Some decoders drop the space before the first word of a text. So each text is decoded with a letter before it, which
    is then removed.
    """
    backend = tokenizer.backend_tokenizer
    lead = backend.encode("a", add_special_tokens=False).ids[-1:]
    letter = backend.decode(lead, skip_special_tokens=False)

    def decode(sequences: list[list[int]]) -> list[str]:
        decoded = backend.decode_batch([lead + ids for ids in sequences], skip_special_tokens=False)
        return [
            text[len(letter) :] if text.startswith(letter) else backend.decode(ids, skip_special_tokens=False)
            for text, ids in zip(decoded, sequences, strict=True)
        ]

    return decode


def node_texts(trie: Trie, decode: Decode, *, limit: int) -> Texts:
    """Return at most `limit` tokens of the nodes as text, the first ones of each node.

    A token is trained if any trajectory trains it. One call of `decode` for each chunk.
    """
    sizes = trie.node_length
    max_kept = _common_limit(sizes, limit)
    kept = np.minimum(sizes, max_kept)
    trained = times_trained(trie) > 0  # bool [tokens_tree]
    chunks, first_node = [], []
    for a, b in _runs(kept):
        first_node.append(a)
        # pieces [[[7, 8], [9]], [[], [4]]] of two nodes: only the three lists that are not empty are decoded.
        pieces = list(_pieces(trie, kept, trained, a, b))
        texts = iter(decode([ids for node in pieces for ids in node if ids]))
        nodes = [[next(texts) if ids else "" for ids in node] for node in pieces]
        chunks.append(json.dumps(nodes, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"))
    left_out = int((sizes - kept).sum())
    return Texts(chunks, first_node, max_kept if left_out else None, left_out)


def _common_limit(sizes: Int64, limit: int) -> int:
    """Return the maximum number of tokens to which all nodes can be cut, so that they have at most `limit` together."""
    # sizes [2, 5, 9], limit 10: 4 gives 2 + 4 + 4 = 10, 5 gives 12 -> 4
    low, high = 0, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.minimum(sizes, middle).sum()) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def _runs(kept: Int64) -> Iterator[tuple[int, int]]:
    """Yield runs [start, end) of consecutive nodes with about `CHUNK_CHARACTERS` together."""
    before = np.concatenate([[0], np.cumsum(kept)])
    start = 0
    while start < len(kept):
        # kept [3, 2, 9], before [0, 3, 5, 14]: from node 0 on, 4 tokens end inside node 1, so the run is nodes 0 and 1
        end = int(np.searchsorted(before, before[start] + CHUNK_CHARACTERS // CHARACTERS_PER_TOKEN))
        yield start, (end := min(max(end, start + 1), len(kept)))
        start = end


def _pieces(trie: Trie, kept: Int64, trained: np.ndarray[Any, np.dtype[np.bool_]], a: int, b: int) -> Iterator[Any]:
    """Yield the token ids of the pieces of each node, untrained and trained in turn."""
    starts = trie.node_start[a:b].tolist()
    for start, size in zip(starts, kept[a:b].tolist(), strict=True):
        flags, tokens = trained[start : start + size], trie.tokens[start : start + size]
        # flags [1, 1, 0] -> cuts [2] -> pieces [], [first two], [third]: the first piece is always untrained
        cuts = np.flatnonzero(flags[1:] != flags[:-1]) + 1
        yield [[]] * int(bool(size and flags[0])) + _split(tokens, cuts)


def _split(tokens: Int32, cuts: Int64) -> list[list[int]]:
    bounds = [0, *cuts.tolist(), len(tokens)]
    ids = tokens.tolist()
    return [ids[i:j] for i, j in pairwise(bounds)]

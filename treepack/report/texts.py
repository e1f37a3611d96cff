"""The text of every node, cut at the bounds of its segments, within a limit for the page.

    Trie, RoleSegments, decode --node_texts--> NodeTexts: chunks of JSON, each for a run of consecutive nodes

The text of a node is a list with one entry for each segment. If the limit is too small for all tokens, every node keeps
its first tokens, the same maximum number for all nodes; segments without a kept token are missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from treepack.report.segments import RoleSegments
from treepack.trajectory import Int64
from treepack.trie.trie import Trie

CHUNK_CHARACTERS = 1 << 18  # 256 kB: the page decompresses a whole chunk to show one of its nodes
_CHARACTERS_PER_TOKEN = 4  # of English and code, roughly

_Decode = Callable[[list[list[int]]], list[str]]


@dataclass(frozen=True, slots=True)
class NodeTexts:
    """Texts of all nodes. `chunks[i]` is JSON, a list of texts for each node from `first_node[i]` on.

    `kept` is the maximum number of tokens of a node, None if no token is left out; `tokens_left_out` counts the others.
    """

    chunks: list[bytes]
    first_node: list[int]
    kept: int | None
    tokens_left_out: int


def ids_as_text(sequences: list[list[int]]) -> list[str]:
    """Return token ids as text, for use without a tokenizer."""
    return ["".join(f"{token} " for token in ids) for ids in sequences]


def decoder_of(tokenizer: Any) -> _Decode:
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


def node_texts(trie: Trie, segments: RoleSegments, decode: _Decode, *, limit: int) -> NodeTexts:
    """Return at most `limit` tokens of the nodes as text, the first ones of each node. One `decode` for each chunk."""
    sizes = trie.node_length
    max_kept = _common_limit(sizes, limit)
    kept = np.minimum(sizes, max_kept)
    chunks, first_node = [], []
    for a, b in _runs(kept):
        first_node.append(a)
        # Segments [[[7, 8], [9]], [[4]]] of two nodes are decoded as one list of three.
        ids_of_nodes = list(_ids_of_segments(trie, kept, segments, a, b))
        texts = iter(decode([ids for node in ids_of_nodes for ids in node]))
        nodes = [[next(texts) for _ in node] for node in ids_of_nodes]
        chunks.append(json.dumps(nodes, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"))
    left_out = int((sizes - kept).sum())
    return NodeTexts(chunks, first_node, max_kept if left_out else None, left_out)


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
        end = int(np.searchsorted(before, before[start] + CHUNK_CHARACTERS // _CHARACTERS_PER_TOKEN))
        yield start, (end := min(max(end, start + 1), len(kept)))
        start = end


def _ids_of_segments(trie: Trie, kept: Int64, segments: RoleSegments, a: int, b: int) -> Iterator[list[list[int]]]:
    """Yield the token ids of each segment of the nodes [a, b), without tokens that are not kept."""
    starts, cuts = trie.node_start[a:b].tolist(), segments.first.tolist()
    bounds = segments.of_node[a : b + 1].tolist()
    for k, (start, size) in enumerate(zip(starts, kept[a:b].tolist(), strict=True)):
        # A node from token 10 on with 5 kept tokens, segments at 10, 12 and 17 -> tokens 10-11 and 12-14
        first = [cut for cut in cuts[bounds[k] : bounds[k + 1]] if cut < start + size]
        yield [trie.tokens[i:j].tolist() for i, j in pairwise([*first, start + size])]

"""Traces of requests without text, with lengths and hashes of blocks only: Mooncake's, and Qwen's of Bailian.

    {"timestamp": 27, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}     blocks of 512 tokens
     46 46 .. 46 | 47 47 .. 47 | 2353 .. 2353 | own own .. own
     512           512           76             52 (trained)

The id of a block identifies the block and all blocks before it, so requests share exactly the blocks with equal ids.
The tokens made here share in the same way: a block repeats its hash id, and the output repeats an id that no other
request of the file has. These tokens are for counting only. Blocks have 512 tokens (Mooncake) or 16 (Bailian); the
number of blocks decides. The last block may be short, or missing.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np

from treepack.formats.kit import (
    Format,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TreepackError,
    describe,
    shown,
)
from treepack.trajectory import Tokens, as_token_ids

_BLOCKS = (512, 16)  # tokens of a block in the two published traces; Mooncake's is tried first
_FIRST_OWN_ID = 1 << 30  # hash ids are below it; the ids of outputs fill the rest of the positive int32 values
_MAX_LENGTH = 1 << 24  # tokens: more than any known context, so a larger length is an error in the file
_USED = frozenset({"input_length", "output_length", "hash_ids"})
_NUMBER = re.compile(r"\d+(?=\]?$)")


def read_mooncake(record: Record, options: ReadOptions) -> Outcomes:
    """Read the one request of `record`.

    Raises:
        TreepackError: `options.shapes` is not set, or lengths and hashes that contradict each other.
    """
    value, source = record.value, record.source
    if not options.shapes:
        raise TreepackError(f"{source}: has the lengths of a request, not its tokens; only treepack stats reads it")
    num_input, num_output = (_length(value[name], name, source) for name in ("input_length", "output_length"))
    if num_output == 0 or num_input + num_output < 2:
        yield Skipped(source, "request without output")
        return
    hashes = as_token_ids(value["hash_ids"], source=source, name="hash_ids")
    if len(hashes) and hashes.max() >= _FIRST_OWN_ID:
        raise TreepackError(
            f"{source}: hash_ids has the id {hashes.max()}; number the blocks from 0 to {_FIRST_OWN_ID - 1}"
        )
    # [46, 47] in blocks of 512 -> 46 repeated 512 times, then 47 repeated 512 times, cut to the input
    size = _block_size(num_input, len(hashes), source)
    tokens = np.full(num_input + num_output, _own_id(record), np.int32)
    blocks = np.repeat(hashes, size)[:num_input]
    tokens[: len(blocks)] = blocks
    content = Tokens(tokens, np.array([max(num_input, 1)], np.int32), np.array([len(tokens)], np.int32), np.ones(1))
    yield describe(record, content, used=_USED, options=options)


def _length(value: Any, name: str, source: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_LENGTH:
        raise TreepackError(f"{source}: {name} is {shown(value)}; expected the number of tokens, at most {_MAX_LENGTH}")
    return value


def _block_size(num_input: int, num_blocks: int, source: str) -> int:
    # 1100 tokens in 3 blocks: ceil(1100 / 512) = 3 -> 512. In 2 blocks: floor -> 512, the last block is missing.
    for size in _BLOCKS:
        if num_blocks in (-(-num_input // size), num_input // size):
            return size
    sizes = " or ".join(map(str, _BLOCKS))
    raise TreepackError(
        f"{source}: has {num_blocks} hash_ids for {num_input} tokens of input; expected one for every {sizes} tokens"
    )


def _own_id(record: Record) -> int:
    """Return an id for the output of this request; two requests of one file never have the same id."""
    # "trace.jsonl:17" -> 17, "trace.json[3]" -> 3
    index = _NUMBER.search(record.source[len(record.path) :])
    # The line number makes ids of one file differ; the path makes equal ids in two files unlikely.
    mixed = zlib.crc32(record.path.encode("utf-8", "surrogateescape")) ^ int(index[0] if index else 0)
    return _FIRST_OWN_ID + mixed % _FIRST_OWN_ID


FORMAT = Format(
    name="mooncake",
    rank=610,
    program="Mooncake, Qwen-Bailian (traces of lengths, for treepack stats only)",
    recognised_by="`input_length`, `output_length` and `hash_ids`",
    requires="input_length, output_length, hash_ids:array",
    used="input_length output_length hash_ids",
    read=read_mooncake,
)

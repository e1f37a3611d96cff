"""Damaged input files: samples of every format and kind, and seeded ways to damage them.

samples(folder)          name -> bytes of an intact file: JSONL, JSON, Parquet, Arrow, YAML, torch, gzip, zstd
damaged(name, data, rng) -> bytes of the same file with a few damages
"""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from support.paths import ROLLOUTS, SAMPLE_DATA

SUFFIXES = {".json", ".jsonl", ".root", ".traj", ".pt", ".parquet"}
MAX_BYTES = 40_000  # larger samples are cut at a line, so that a run stays quick

# Values that a field may have by mistake. A text that begins with RAW is written without quotes.
RAW = "\0"
ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 7, 1.5, 2**31, 2**63, 2**70, -(2**70), 10**400, "", "x", "assistant", "\ud800"),
    *([], {}, [[]], [None], [{}], [1], ["a"], [[1, 2]], {"a": 1}, {"role": "user"}, [{"role": "user", "content": 1}]),
    *(RAW + "NaN", RAW + "Infinity", RAW + "-Infinity", RAW + "1e999", RAW + "-0.0", RAW + "1e-400", RAW + "01"),
    *("\x00", "\u2028", "<|im_end|>", "a" * 5000, "\xe9\udcff", RAW + '"\\ud83d"', RAW + '"\\x"'),
    *(RAW + "[" * depth + "]" * depth for depth in (80, 300, 900, 50_000)),
    *(RAW + '{"a":' * depth + "1" + "}" * depth for depth in (80, 300, 900)),
]
NOISE = [b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"}", b"]", b'"', b"<<<<<<< HEAD\n"]


def samples() -> dict[str, bytes]:
    """Return the samples under tests/rollouts and sample_data, and some of them as files of other kinds."""
    folders = {"rollouts": ROLLOUTS, "sample_data": SAMPLE_DATA}
    files = {
        f"{name}/{path.relative_to(folder)}": _shorter(path.read_bytes())
        for name, folder in folders.items()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in SUFFIXES and "tokenizer" not in path.parts
    }
    tokens = [json.loads(line) for line in files["rollouts/tokens.jsonl"].splitlines()]
    chats = [json.loads(line) for line in files["rollouts/chat.jsonl"].splitlines()]
    chat = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
    ids = [{"id": str(i), "input_ids": [1, 2, i], "loss_mask": [0, 1, 1], "reward": 0.5} for i in range(40)]
    files |= {
        "made/array.json": json.dumps(tokens).encode(),
        "made/pretty.json": json.dumps(chats, indent=2).encode(),
        "made/wrapped.json": json.dumps({"version": 1, "data": chats}).encode(),
        "made/tokens.parquet": _parquet(ids),
        "made/chat.parquet": _parquet([chat] * 3),
        "made/tokens.arrow": _arrow(ids, pa.ipc.new_file),
        "made/stream.arrow": _arrow(ids, pa.ipc.new_stream),
        "made/tokens.jsonl.gz": gzip.compress(files["rollouts/tokens.jsonl"], mtime=0),
        "made/chat.jsonl.zst": pa.compress(files["rollouts/chat.jsonl"], codec="zstd", asbytes=True),
        "made/chats.yaml": _yaml(chats[0]),
        "made/dump.pt": _torch(ids),
    }
    return files


def _shorter(data: bytes) -> bytes:
    return data if len(data) <= MAX_BYTES else data[: data.rfind(b"\n", 0, MAX_BYTES) + 1] or data[:MAX_BYTES]


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=8)
    return sink.getvalue()


def _arrow(rows: list[dict[str, Any]], open_writer: Callable[..., Any]) -> bytes:
    sink, table = io.BytesIO(), pa.Table.from_pylist(rows)
    with open_writer(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=8)
    return sink.getvalue()


def _yaml(value: Any) -> bytes:
    import yaml  # type: ignore[import-untyped]

    text: str = yaml.safe_dump(value)
    return text.encode()


def _torch(rows: list[dict[str, Any]]) -> bytes:
    import torch

    sink = io.BytesIO()
    torch.save([row | {"input_ids": torch.tensor(row["input_ids"])} for row in rows], sink)
    return sink.getvalue()


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with one to five damages."""
    is_text = data[:1] in (b"{", b"[", b"\n", b" ")
    for _ in range(rng.choice((1, 1, 2, 5))):
        if is_text and rng.random() < 0.8:
            data = _with_odd_value(data, rng)
        elif data[:2] == b"\x1f\x8b" and rng.random() < 0.5:
            data = gzip.compress(damaged(_unpacked(data), rng), mtime=0)
        else:
            data = rng.choice(BYTE_DAMAGES)(data, rng)
    return data


def _unpacked(data: bytes) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, ValueError):
        return b"{}"
    except Exception:  # zlib.error of a damaged stream
        return b"[]"


def _truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _without_a_part(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.randint(1, 50) :]


def _with_a_part_twice(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    end = start + rng.randint(1, 200)
    return data[:end] + data[start:end] + data[end:]


def _with_noise(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    noise = rng.choice([*NOISE, rng.randbytes(8)])
    return data[:start] + noise + data[start:]


def _in_another_encoding(data: bytes, rng: random.Random) -> bytes:
    text = data.decode("utf-8", "replace")
    return text.encode(rng.choice(["utf-16", "utf-16-le", "utf-32", "latin-1", "utf-8-sig", "utf-7"]), "replace")


BYTE_DAMAGES = (_truncated, _flipped, _without_a_part, _with_a_part_twice, _with_noise, _in_another_encoding)


def _with_odd_value(data: bytes, rng: random.Random) -> bytes:
    """Return JSON or JSONL in which one value, at a random place, was replaced, removed or doubled."""
    lines = data.split(b"\n")
    number = rng.randrange(len(lines))
    for text, whole in ((data, True), (lines[number], False)):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        changed = _changed(value, rng).encode("utf-8", "surrogatepass")
        if whole:
            return changed
        return b"\n".join([*lines[:number], changed, *lines[number + 1 :]])
    return rng.choice(BYTE_DAMAGES)(data, rng)


def _changed(value: Any, rng: random.Random) -> str:
    """Return `value` as JSON text with one change inside."""
    holder: Any = [value]
    parent, key = holder, 0
    # Go down a random path; stop with a probability of a fifth at each level.
    while isinstance(parent[key], dict | list) and parent[key] and (parent is holder or rng.random() < 0.8):
        parent = parent[key]
        key = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    action = rng.random()
    if action < 0.65:
        parent[key] = rng.choice(ODD_VALUES)
    elif action < 0.8:
        del parent[key]
    elif isinstance(parent, list):
        parent.insert(key, parent[key])
    else:
        parent[str(key) + rng.choice(["", "s", "_"])] = parent.pop(key)
    return json_text(holder[0] if holder else None, ensure_ascii=rng.random() < 0.5)


def json_text(value: Any, *, ensure_ascii: bool = True) -> str:
    """Return `value`, in which some of `ODD_VALUES` may be, as JSON."""
    text = json.dumps(value, ensure_ascii=ensure_ascii)
    for odd in ODD_VALUES:
        if isinstance(odd, str) and odd.startswith(RAW) and len(odd) > 1:
            text = text.replace(json.dumps(odd), odd[1:])
    return text


def write_samples(files: dict[str, bytes], name: str, folder: Path) -> Path:
    """Write the sample `name` into `folder`, with the other files of its format if it has a folder; return its path.

    Names and folders of files do not change, because a reader may use them.
    """
    parts = Path(name).parts[:2]
    for other, data in files.items():
        if other == name or (len(Path(name).parts) > 2 and Path(other).parts[:2] == parts):
            path = folder / other
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return folder / name

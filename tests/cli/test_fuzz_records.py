"""Odd values in each field of the files that users write: records, plans, predictions, tools, prompts, configurations.

Each file is read or refused in one sentence, and its rollouts are packed and measured. The commands run below the net
that reports unforeseen exceptions, so such an exception fails the test.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.damage import ODD_VALUES, json_text
from support.directory_damage import write_directories
from support.fuzzed_commands import outcome
from support.oracle_model import tiny_config
from support.paths import SAMPLE_DATA

SEED = 41
TOKENS = {
    "id": "a",
    "group_id": "g",
    "input_ids": [5, 6, 7, 8],
    "loss_mask": [0, 0, 1, 1],
    "reward": 1.0,
    "step": 3,
    "weight": 0.5,
    "advantage": 0.5,
    "logprobs": [0.0, 0.0, -0.5, -0.25],
    "temperature": 0.7,
    "metadata": {"task": {"name": "x"}},
}
TREE = {
    "id": "t",
    "group_id": "g",
    "input_ids": [5, 6, 7, 8],
    "loss_mask": [0, 0, 1, 1],
    "segments": [2, 3],
    "segment_ids": [0, 1],
    "leaf_weight": 0.5,
}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"n": 1}'}}
CHAT = {
    "id": "c",
    "group_id": "g",
    "reward": 1.0,
    "messages": [
        {"role": "system", "content": "Add numbers."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 1"}]},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "2", "reasoning_content": "easy"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}],
}
PLAN = [
    {"format": "treepack-plan", "version": 1, "capacity": 64, "pairs": 10_000, "terms": 1000, "multiple_of": 1}
    | {"method": "mine", "lower_bound": 5},
    {"trajectory_ids": [f"r{i}" for i in range(4)]},
    {"trajectory_ids": [f"r{i}" for i in range(4, 8)]},
]
ROOTS = [{"group_id": "g0", "value": 0.5}, {"group_id": "g1", "value": 0.25}]
PREFIXES = [
    {"trajectory_id": f"r{i}", "group_id": f"g{i // 4}", "turn": 1, "num_tokens": 3, "value": 0.5} for i in range(8)
]
PROMPTS = [{"id": "p", "input_ids": [5, 6]}]


@dataclass(frozen=True)
class Kind:
    """A file with `value` as JSON, or as JSON lines if it is in `lines`, and the commands that read it."""

    value: Any
    commands: tuple[str, ...]
    lines: bool = True


OUT = "--out {out} --overwrite"
BUILD = f"build-trie {{}} {OUT}"
AFTER = ("stats {out} --check", "pack {out} --out {out}-packed --overwrite", "show {out}")
ENGINE = "--engine {folder}/engine.json --sampler independent --max-tokens 2 --width 1 --stop-token-id 9"
ROLLOUT = f"rollout {{}} {ENGINE} --out {{out}}.jsonl"
KINDS = {
    "tokens": Kind([TOKENS], (BUILD, *AFTER)),
    "tree": Kind([TREE], (BUILD, "pack {out} --leaf-weights --out {out}-packed --overwrite")),
    "chat": Kind([CHAT], (f"{BUILD} --tokenizer {{tokenizer}}", *AFTER)),
    "turns": Kind([CHAT], (f"{BUILD} --tokenizer {{tokenizer}} --expand turns --normalize-ids",)),
    "skipped": Kind([TOKENS], (f"{BUILD} --skip-bad", "show {}")),
    "plan": Kind(PLAN, (f"pack {{folder}}/trie --plan {{}} {OUT}",)),
    "roots": Kind(ROOTS, ("allocate roots {} --budget 8 --out {out}.jsonl --overwrite",)),
    "prefixes": Kind(
        PREFIXES,
        (
            "allocate prefixes {folder}/trie --predictions {} --segment recorded --expand 2 --out {out}.jsonl",
            "stats {folder}/trie --segment recorded --predictions {}",
        ),
    ),
    "tools": Kind(
        CHAT["tools"],
        (f"build-trie {{folder}}/chat.jsonl --tokenizer {{tokenizer}} --tools {{}} {OUT}",),
        lines=False,
    ),
    "config": Kind(None, ("stats {folder}/trie --model {}",), lines=False),
    "prompts": Kind(PROMPTS, (ROLLOUT,)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    write_directories(folder)
    (folder / "chat.jsonl").write_text(json.dumps({**CHAT, "tools": None}) + "\n")
    tiny_config(folder / "engine.json")
    return folder


def paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from paths(each, (*path, key))


def cases(folder: Path) -> list[tuple[str, tuple[str | int, ...], Any]]:
    """Every odd value, and none at all, at every place of every kind of file; many for one that has few places."""
    result = []
    for name, kind in KINDS.items():
        value = json.loads((folder / "engine.json").read_text()) if name == "config" else kind.value
        result += [(name, path, odd) for path in paths(value) for odd in (*ODD_VALUES, ...)]
    return result


def text_of(kind: Kind, value: Any) -> str:
    if kind.lines and isinstance(value, list):
        return "".join(json_text(each) + "\n" for each in value)
    return json_text(value)


def changed(value: Any, path: tuple[str | int, ...], odd: Any) -> Any:
    value = copy.deepcopy(value)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    if odd is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = odd
    return value


def write(path: Path, text: str, rng: random.Random, kind: Kind) -> Path:
    """Write `text` as JSON, and sometimes as a table of Parquet if all its values fit into one."""
    if kind.lines and rng.random() < 0.2:
        try:
            table = pa.Table.from_pylist([json.loads(line) for line in text.splitlines()])
            pq.write_table(table, path.with_suffix(".parquet"))
            return path.with_suffix(".parquet")
        except (pa.ArrowException, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            pass
    path.write_text(text, errors="surrogatepass")
    return path


@pytest.mark.parametrize("share", range(4))
@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.slow)], ids=["some", "many"])
def test_an_odd_value_is_read_or_refused_in_one_sentence(folder: Path, tmp_path: Path, count: int, share: int) -> None:
    """200 cases, as many of each kind of file; four shares, so that they can run side by side."""
    by_kind: dict[str, list[Any]] = {name: [] for name in KINDS}
    for case in cases(folder):
        by_kind[case[0]].append(case)
    rng = random.Random(SEED)
    for of_kind in by_kind.values():
        rng.shuffle(of_kind)
    chosen = [case for several in zip(*by_kind.values(), strict=False) for case in several][share::4][:count]
    results, faults = [], []
    for number, (name, path, odd) in enumerate(chosen):
        kind = KINDS[name]
        value = json.loads((folder / "engine.json").read_text()) if name == "config" else kind.value
        own = random.Random(f"{SEED} {share} {number}")
        file = write(tmp_path / f"{name}.json{'l' * kind.lines}", text_of(kind, changed(value, path, odd)), own, kind)
        out = str(tmp_path / f"out-{number}")
        names = {"out": out, "folder": str(folder), "tokenizer": str(SAMPLE_DATA / "tokenizer")}
        for command in kind.commands:
            try:
                results.append(outcome(*(part.format(str(file), **names) for part in command.split())))
            except AssertionError as error:
                faults.append(f"{name} {path} {str(odd)[:60]!r}: {error}")
                break
            if results[-1] == "refused":
                break
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults)
    assert "refused" in results


@pytest.mark.parametrize("name", KINDS)
def test_every_command_works_before_a_value_is_replaced(folder: Path, tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    file = tmp_path / f"{name}.json{'l' * kind.lines}"
    file.write_text(text_of(kind, json.loads((folder / "engine.json").read_text()) if name == "config" else kind.value))
    names = {"out": str(tmp_path / "out"), "folder": str(folder), "tokenizer": str(SAMPLE_DATA / "tokenizer")}
    for command in kind.commands:
        assert outcome(*(part.format(str(file), **names) for part in command.split())) == "done", command

"""Tries among the inputs of a build: any division of the rollouts into tries gives the trie of all rollouts."""

from __future__ import annotations

import filecmp
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.paths import SAMPLE_DATA as SAMPLES
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.manifest import read_manifest
from treepack.ingest.options import BuildOptions
from treepack.rl.advantages.advantage_options import AdvantageOptions
from treepack.rl.advantages.directory import write_advantages
from treepack.sequences import unique_ids
from treepack.trie.builders import builder
from treepack.trie.builders.earlier_tries import as_read
from treepack.trie.directory import build_trie_directory

TOKENIZER = str(SAMPLES / "tokenizer")


def assert_equal(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])


# Ids that repeat, that look like the names of repeated ones, and records that are skipped.
_IDS = ("a", "b", "a@0.jsonl:1", "a@1.jsonl:1", "a@0.jsonl:1#2")


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    tokens = draw(st.lists(st.integers(0, 2), min_size=2, max_size=6))
    record = {"uid": draw(st.sampled_from(_IDS)), "prompt_ids": tokens[:1], "response_ids": tokens[1:]}
    optional: dict[str, st.SearchStrategy[Any]] = {
        "group_id": st.sampled_from("gh"),
        "step": st.integers(0, 2),
        "reward": st.sampled_from([0.0, 1.0]),
        "rollout_log_probs": st.just([-0.5] * (len(tokens) - 1)),
        "response_mask": st.just([0] * (len(tokens) - 1)),  # nothing is trained, so the record is skipped
    }
    for name in draw(st.sets(st.sampled_from(sorted(optional)), max_size=4)):
        record[name] = draw(optional[name])
    return record


def built(inputs: Sequence[str], out: str, options: BuildOptions) -> list[str]:
    """Return the trie of `inputs`, or else the inputs, which have no trajectory."""
    with suppress(TreepackError):
        build_trie_directory(inputs, out, options, overwrite=True)
        return [out]
    return [*inputs]


@given(
    files=st.lists(st.lists(records(), min_size=1, max_size=4), min_size=2, max_size=5),
    share=st.sampled_from(("all", "group", "none")),
    data=st.data(),
)
def test_any_division_into_files_gives_the_same_bytes(
    files: list[list[dict[str, Any]]], share: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("division")
    options = BuildOptions(share=share)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        names = [f"{number}.jsonl" for number in range(len(files))]
        for name, own in zip(names, files, strict=True):
            Path(name).write_text("".join(json.dumps(record) + "\n" for record in own))
        # A file with the bytes of another one is read once, unless it is in another trie.
        assume(len({Path(name).read_bytes() for name in names}) == len(names))
        assume(built(names, "whole", options) == ["whole"])
        # Contiguous shares, each of them rollouts, a trie, or a trie of tries.
        cuts = sorted(data.draw(st.sets(st.integers(1, len(files) - 1))))
        shares: list[str] = []
        for number, (begin, end) in enumerate(itertools.pairwise([0, *cuts, len(files)])):
            kind = data.draw(st.sampled_from(("rollouts", "trie", "tries")))
            inputs = names[begin:end]
            if kind == "tries":
                inputs = [trie for name in inputs for trie in built([name], f"trie-{name}", options)]
            shares += inputs if kind == "rollouts" else built(inputs, f"share-{number}", options)
        build_trie_directory(shares, "joined", options)
        assert_equal(Path("whole"), Path("joined"))
        # Only the log names skipped rollouts in the order of the inputs.
        build_trie_directory([*reversed(shares)], "backwards", options)
        assert read_manifest(Path("whole"))["files"] == read_manifest(Path("backwards"))["files"]
    shutil.rmtree(folder)


@given(
    rows=st.lists(st.tuples(st.sampled_from(("a", "b", "a@f:1", "a@f:1#2", "a@g:1")), st.sampled_from(("f:1", "g:1")))),
    data=st.data(),
)
def test_names_do_not_depend_on_the_order_of_files_and_come_back_from_a_trie(
    rows: list[tuple[str, str]], data: st.DataObject
) -> None:
    assume(rows)
    ids, sources = (pa.chunked_array([pa.array(each)]) for each in zip(*rows, strict=True))
    names, renamed = unique_ids(ids, sources)
    assert len(set(names.to_pylist())) == len(rows)
    # The files in another order: rows of one source keep theirs.
    other = pa.array(sorted(range(len(rows)), key=lambda row: sources[row].as_py(), reverse=True))
    again, _ = unique_ids(ids.take(other), sources.take(other))
    assert again.to_pylist() == names.take(other).to_pylist()
    # A trie has its rows in an order of its own.
    order = pa.array(data.draw(st.permutations(range(len(rows)))), pa.int64())
    read, arrival = as_read(names.take(order), schema.RENAMED.empty_table() if renamed is None else renamed)
    assert read.to_pylist() == ids.take(order).to_pylist()
    back = pa.array(np.argsort(arrival))
    again, _ = unique_ids(read.take(back), sources.take(order).take(back))
    assert again.to_pylist() == names.take(order).take(back).to_pylist()


@pytest.mark.parametrize("workers", [1, 2])
def test_chats_search_trees_and_token_ids_grow_to_one_trie(workers: int, tmp_path: Path) -> None:
    names = [str(SAMPLES / name) for name in ("chat.jsonl", "search_tree.json", "tokens.jsonl")]
    options = BuildOptions(tokenizer=TOKENIZER)
    build_trie_directory(names, tmp_path / "whole", options)
    for number, name in enumerate(names):
        build_trie_directory(name, tmp_path / f"{number}", options)
    mixed = [str(tmp_path / "0"), names[1], str(tmp_path / "2")]
    build_trie_directory(mixed, tmp_path / "mixed", replace(options, workers=workers))
    assert_equal(tmp_path / "whole", tmp_path / "mixed")
    # Without rollouts, no tokenizer is needed.
    build_trie_directory([str(tmp_path / f"{number}") for number in range(3)], tmp_path / "tries")
    assert_equal(tmp_path / "whole", tmp_path / "tries")


def test_large_tries_are_merged_in_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "RUN_BYTES", 1 << 14)
    monkeypatch.setattr(builder, "MIN_RUN_BYTES", 1 << 14)
    lines = (SAMPLES / "tokens.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[::2]))
    (tmp_path / "b.jsonl").write_text("".join(lines[1::2]))
    build_trie_directory([str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")], tmp_path / "whole")
    build_trie_directory(tmp_path / "a.jsonl", tmp_path / "a")
    build_trie_directory([str(tmp_path / "a"), str(tmp_path / "b.jsonl")], tmp_path / "grown")
    assert_equal(tmp_path / "whole", tmp_path / "grown")


def _other_share(folder: Path) -> tuple[list[Path], BuildOptions]:
    return [folder / "trie"], BuildOptions(share="group")


def _other_tokenizer(folder: Path) -> tuple[list[Path], BuildOptions]:
    return [folder / "trie"], BuildOptions(tokenizer=TOKENIZER)


def _tokenizer_and_none(folder: Path) -> tuple[list[Path], BuildOptions]:
    chats = folder / "chats"
    build_trie_directory(SAMPLES / "chat.jsonl", chats, BuildOptions(tokenizer=TOKENIZER))
    return [chats, folder / "trie"], BuildOptions()


def _other_template(folder: Path) -> tuple[list[Path], BuildOptions]:
    template = folder / "own.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = folder / "chat.jsonl"
    words = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    chat.write_text(json.dumps({"messages": words}) + "\n")
    options = BuildOptions(tokenizer=TOKENIZER)
    build_trie_directory(chat, folder / "one", options)
    build_trie_directory(chat, folder / "two", replace(options, chat_template=str(template)))
    return [folder / "one", folder / "two"], options


def _later_columns(folder: Path) -> tuple[list[Path], BuildOptions]:
    write_advantages(folder / "trie", folder / "advantages", AdvantageOptions("grpo"))
    return [folder / "advantages"], BuildOptions()


def _twice(folder: Path) -> tuple[list[Path], BuildOptions]:
    shutil.copytree(folder / "trie", folder / "copy")
    return [folder / "trie", folder / "copy"], BuildOptions()


def _with_routes(folder: Path) -> tuple[list[Path], BuildOptions]:
    rollouts = folder / "routed.jsonl"
    routes = [[[0, 1]], [[1, 2]]]
    record = {"prompt_ids": [1], "response_ids": [2, 3], "rollout_routed_experts": routes}
    rollouts.write_text(json.dumps(record) + "\n")
    build_trie_directory(rollouts, folder / "routed", BuildOptions(keep_routes=True))
    return [folder / "routed"], BuildOptions()


def _keeping_routes(folder: Path) -> tuple[list[Path], BuildOptions]:
    return [folder / "trie"], BuildOptions(keep_routes=True)


def _other_version(folder: Path) -> tuple[list[Path], BuildOptions]:
    manifest = folder / "trie" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    return [folder / "trie"], BuildOptions()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (_other_share, "trie: has --share all; give that too, or build it again from its rollouts"),
        (_other_tokenizer, "trie: was built with no tokenizer, and this build has the tokenizer"),
        (_tokenizer_and_none, "trie: was built with no tokenizer, and this build has the tokenizer"),
        (_other_template, "two: its conversations have the chat template own.jinja, and others"),
        (
            _later_columns,
            "advantages: has columns of a later command, or an older treepack wrote it; give the trie that",
        ),
        (_twice, "copy: is the same trie as"),
        (_with_routes, "routed: tries with recorded routes cannot be joined; build one trie of all rollouts"),
        (_keeping_routes, "trie: tries with recorded routes cannot be joined; build one trie of all rollouts"),
        (_other_version, "manifest.json: has treepack-trie version 2; this treepack reads version 1"),
    ],
)
def test_tries_that_one_build_cannot_have_made_are_refused(
    make: Callable[[Path], tuple[list[Path], BuildOptions]], sentence: str, tmp_path: Path
) -> None:
    rollouts = tmp_path / "rollouts.jsonl"
    records = [{"prompt_ids": [1, 2], "response_ids": [n], "reward": float(n), "group_id": "g"} for n in range(2)]
    rollouts.write_text("".join(json.dumps(record) + "\n" for record in records))
    build_trie_directory(rollouts, tmp_path / "trie")
    tries, options = make(tmp_path)
    with pytest.raises(TreepackError) as raised:
        build_trie_directory([str(path) for path in tries], tmp_path / "out", options)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()

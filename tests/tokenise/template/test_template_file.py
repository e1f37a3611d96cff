"""`--chat-template FILE`: a template from a file in place of the tokenizer's, and the files that are refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from support import real_templates
from support.byte_tokenizer import PLAIN, STRIPPING, save
from support.command_line import Run
from treepack import BuildOptions, TreepackError, build_trie_directory
from treepack.ingest.stream import read
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trajectory import Tokens, Trajectory

MESSAGES = [
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A", "reasoning_content": "Why"},
    {"role": "user", "content": "R"},
    {"role": "assistant", "content": "B"},
]
ROLLOUTS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    save(folder / "bare", None)
    save(folder / "stripping", STRIPPING)
    (folder / "plain.jinja").write_text(PLAIN)
    (folder / "r.jsonl").write_text("".join(json.dumps({"messages": MESSAGES}) + "\n" for _ in range(ROLLOUTS)))
    return folder


def options(folder: Path, tokenizer: str, **more: Any) -> BuildOptions:
    return BuildOptions(tokenizer=str(folder / tokenizer), **more)


def texts(folder: Path, build: BuildOptions) -> list[str]:
    tokenizer = load_tokenizer(str(folder / "bare"))
    samples = list(read([str(folder / "r.jsonl")], build))
    assert all(isinstance(sample, Trajectory) and isinstance(sample.content, Tokens) for sample in samples)
    return [tokenizer.decode(sample.content.tokens) for sample in samples]  # type: ignore[union-attr]


@pytest.mark.parametrize(("tokenizer", "workers"), [("bare", 1), ("bare", 2), ("stripping", 1)])
def test_the_template_of_a_file_replaces_that_of_the_tokenizer(folder: Path, tokenizer: str, workers: int) -> None:
    whole = (
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\nWhy\n</think>\n\nA<|im_end|>\n"
        "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\nB<|im_end|>"
    )
    build = options(folder, tokenizer, chat_template=str(folder / "plain.jinja"), workers=workers)
    assert texts(folder, build) == [whole] * ROLLOUTS


def test_a_training_template_of_trl_is_read_as_a_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "training.jinja"
    file.write_text(real_templates.template("qwen3_training"))
    (text,) = set(texts(folder, options(folder, "bare", chat_template=str(file))))
    assert text.count("<think>") == 2  # the template keeps earlier thoughts, so the conversation is one sample


def test_the_manifest_names_the_file_and_its_hash(folder: Path, tmp_path: Path) -> None:
    given = build_trie_directory(
        [folder / "r.jsonl"], tmp_path / "given", options(folder, "bare", chat_template=str(folder / "plain.jinja"))
    )
    expected = {"name": "plain.jinja", "sha256": hashlib.sha256(PLAIN.encode()).hexdigest()}
    assert given.manifest["options"]["chat_template"] == expected
    own = build_trie_directory([folder / "r.jsonl"], tmp_path / "own", options(folder, "stripping"))
    assert "chat_template" not in own.manifest["options"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "cannot be read (No such file or directory); check the path"),
        (b"", "is empty; give a chat template in Jinja"),
        (b"\xff\xfe", "is not UTF-8 (invalid start byte); give a chat template in Jinja"),
        (
            b"a\n{% if %}",
            "the chat template is not valid Jinja (line 2: Expected an expression, got 'end of statement block'); "
            "fix it, or give another one (--chat-template FILE)",
        ),
    ],
)
def test_a_file_that_is_no_template_is_refused_before_the_rollouts(
    folder: Path, tmp_path: Path, content: bytes | None, fault: str
) -> None:
    file = tmp_path / "t.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TreepackError) as caught:
        build_trie_directory(["missing.jsonl"], tmp_path / "out", options(folder, "bare", chat_template=str(file)))
    assert str(caught.value) == f"{file}: {fault}"


def test_commands_that_read_rollouts_take_the_option(folder: Path, treepack: Run) -> None:
    template = ("--chat-template", str(folder / "plain.jinja"), "--tokenizer", str(folder / "bare"))
    shown = treepack("show", str(folder / "r.jsonl"), *template, "--text", "--trajectory", f"{folder / 'r.jsonl'}:1")
    assert shown.status == 0, shown.err
    assert "Why" in shown.out

"""Training saves the chat template of its data: whole models, adapters, merged ones, resumed runs, vision-language."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from support.byte_tokenizer import PLAIN, STRIPPING, save
from support.command_line import Run
from support.oracle_model import tiny_model
from support.tiny_vision import save_vision, tiny_vision
from treepack import BuildOptions, build_trie_directory, pack_trie
from treepack.files.manifest import Provenance, read_manifest, write_manifest

NEW = PLAIN.replace("tools\n", "functions\n")
CHATS = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]} for answer in "ab"]
QUICK = ("--device", "cpu", "--steps", "1", "--lr", "0.01")


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    rollouts, template, tokenizer = tmp_path / "r.jsonl", tmp_path / "new.jinja", save(tmp_path / "tokenizer", PLAIN)
    rollouts.write_text("".join(json.dumps(each) + "\n" for each in CHATS))
    template.write_text(NEW)
    build_trie_directory(rollouts, tmp_path / "trie", BuildOptions(tokenizer=tokenizer, chat_template=str(template)))
    return Path(str(pack_trie(tmp_path / "trie", tmp_path / "packed").path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny_model("qwen3", dtype=torch.float32, vocab_size=300).save_pretrained(folder)
    save(folder, STRIPPING)
    return folder


@pytest.mark.parametrize("options", [(), ("--lora-rank", "2"), ("--lora-rank", "2", "--merge")])
def test_a_model_is_saved_with_the_template_of_its_data(
    treepack: Run, packed: Path, model: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = treepack("train", packed, "--model", model, *QUICK, *options, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    assert "made with the chat template new.jinja, and the model's tokenizer has another one" in done.err
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == NEW
    again = treepack("train", packed, "--model", tmp_path / "out", *QUICK, "--out", tmp_path / "again")
    assert "chat template" not in again.err
    assert AutoTokenizer.from_pretrained(tmp_path / "again").chat_template == NEW


def test_a_resumed_run_saves_the_template_too(treepack: Run, packed: Path, model: Path, tmp_path: Path) -> None:
    arguments: tuple[Any, ...] = ("train", packed, "--model", model, *QUICK, "--out", tmp_path / "out")
    assert treepack(*arguments).status == 0
    assert treepack(*arguments, "--steps", "2", "--resume").status == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == NEW


def test_rows_without_the_entry_leave_the_template_of_the_model(
    treepack: Run, packed: Path, model: Path, tmp_path: Path
) -> None:
    manifest: dict[str, Any] = dict(read_manifest(packed))
    del manifest["chat_template"], manifest["sha256"]
    write_manifest(packed, manifest)  # type: ignore[arg-type]
    assert Provenance.of(read_manifest(packed)).chat_template is None
    done = treepack("train", packed, "--model", model, *QUICK, "--out", tmp_path / "out")
    assert (done.status, "chat template" in done.err) == (0, False)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == STRIPPING


def test_rows_of_different_templates_are_refused_also_as_held_out_rows(
    treepack: Run, packed: Path, model: Path, tmp_path: Path
) -> None:
    build_trie_directory(tmp_path / "r.jsonl", tmp_path / "old", BuildOptions(tokenizer=str(tmp_path / "tokenizer")))
    pack_trie(tmp_path / "old", tmp_path / "other")
    for more in ((tmp_path / "other",), ("--eval", tmp_path / "other")):
        done = treepack("train", packed, *more, "--model", model, *QUICK, "--out", tmp_path / "out")
        assert (done.status, "other: was made with the chat template" in done.err) == (1, True)
        assert "importing torch" not in done.err


def test_a_vision_language_copy_has_the_template_in_its_old_file_too(
    treepack: Run, packed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "vision"
    save_vision(tiny_vision("qwen2_vl", vocab_size=310), folder)
    save(folder, STRIPPING)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": STRIPPING}))
    done = treepack("train", packed, "--model", folder, *QUICK, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == NEW
    assert not (tmp_path / "out" / "chat_template.json").exists()

"""Common mistakes: each is one sentence that names the next command or the right path."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command_line import Run
from support.written_rollouts import write_rollouts


@pytest.fixture
def folder(treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with rollouts.jsonl, trie/ and packed/."""
    monkeypatch.chdir(tmp_path)
    write_rollouts(tmp_path / "rollouts.jsonl")
    assert treepack("build-trie", "rollouts.jsonl", "--out", "trie").status == 0
    assert treepack("pack", "trie", "--capacity", 12, "--out", "packed").status == 0
    return tmp_path


BUILD = "make a trie of rollouts with: treepack build-trie rollouts.jsonl --out TRIE"
PREDICTIONS = (
    "is a directory; give a file of predictions, JSON lines or Parquet, such as treepack values predict writes"
)
PREPARE = "pack rollouts with: treepack prepare rollouts.jsonl --out DATA"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("pack rollouts.jsonl --out x", f"rollouts.jsonl: is no trie; {BUILD}"),
        ("advantages rollouts.jsonl --estimator grpo --out x", f"rollouts.jsonl: is no trie; {BUILD}"),
        ("pack none --out x", "none: no such directory; check the path"),
        ("stats packed --tokenizer none", "packed: its rollouts are read already; leave out --tokenizer"),
        ("report packed --out x.html --format chat", "packed: its rollouts are read already; leave out --format"),
        ("show trie --format chat", "trie: its rollouts are read already; leave out --format"),
        ("stats trie --skip-bad --expand turns", "trie: its rollouts are read already; leave out --expand, --skip-bad"),
        ("pack packed --out x", "packed: is packed already; give the trie that it was packed from, trie"),
        (
            "advantages packed --estimator grpo --out x",
            "packed: is packed already; give the trie that it was packed from, trie",
        ),
        ("train trie --model none --out x", "trie: is a trie; pack it first with: treepack pack trie --out PACKED"),
        ("train rollouts.jsonl --model none --out x", f"rollouts.jsonl: is no packed directory; {PREPARE}"),
        ("logprobs trie --model none --out x", "trie: is a trie; pack it first with: treepack pack trie --out PACKED"),
        ("augment trie --packed trie --out x", "trie: is a trie; pack it first with: treepack pack trie --out PACKED"),
        (
            "allocate roots trie --budget 10 --out x.jsonl",
            f"trie: {PREDICTIONS}",
        ),
        (
            "allocate prefixes trie --predictions packed --expand 2 --out x.jsonl",
            f"packed: {PREDICTIONS}",
        ),
    ],
)
def test_a_mistake_is_answered_by_what_to_do(treepack: Run, folder: Path, command: str, sentence: str) -> None:
    result = treepack(*command.split())
    assert (result.status, result.err.splitlines()[-1]) == (1, f"treepack: {sentence}")
    assert result.out == ""


@pytest.mark.parametrize("given", ["model", "model/config.json", "model/checkpoints"])
def test_a_saved_model_is_no_folder_of_rollouts(given: str, folder: Path, treepack: Run) -> None:
    step = folder / "model" / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    for path in (step, step.parent.parent):
        (path / "model.safetensors").touch()
    (step / "checkpoint.json").write_text('{"format": "treepack-checkpoint", "step": 2, "model": "sum", "files": []}')
    (step.parent.parent / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 100}')
    (step.parent.parent / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    done = treepack("build-trie", given, "--out", "x")
    assert done.status == 1
    named = "model" if given == "model/config.json" else "model/checkpoints/step-00000002"
    assert done.err == (
        f"treepack: {named}: is the directory of a saved model, which has no rollouts; give files of rollouts"
        f"{', and this directory as --model or --tokenizer' if named == 'model' else ''}\n"
    )
    assert not (folder / "x").exists()


def test_rollouts_beside_a_saved_model_are_read(folder: Path, treepack: Run) -> None:
    (folder / "trained").mkdir()
    (folder / "trained" / "model.safetensors").touch()
    (folder / "trained" / "config.json").write_text('{"model_type": "qwen3"}')
    write_rollouts(folder / "trained" / "rollouts.jsonl")
    assert treepack("build-trie", "trained", "--out", "x").status == 0

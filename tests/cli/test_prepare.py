"""`treepack prepare`: the commands one by one, in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command_line import Run
from support.paths import SAMPLE_DATA
from support.refusal import refusal
from support.written_rollouts import write_rollouts
from treepack.analysis.check import check
from treepack.analysis.glossary import GLOSSARY
from treepack.analysis.stats import stats
from treepack.data.dataset import PackedDataset
from treepack.files.manifest import read_manifest
from treepack.files.prepared import PACKED, TRIE, prepared_part
from treepack.pack.directory import pack_trie
from treepack.pack.options import PackOptions
from treepack.report.write import write_report
from treepack.rl.advantages.advantage_options import AdvantageOptions
from treepack.rl.advantages.directory import write_advantages

CHAT = (SAMPLE_DATA / "chat.jsonl", "--tokenizer", SAMPLE_DATA / "tokenizer")
TOKENS = (SAMPLE_DATA / "tokens.jsonl",)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_bytes_are_those_of_the_commands_one_by_one(
    tmp_path: Path, treepack: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "all"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")  # manifests contain the path of the trie as it was given
    assert treepack("build-trie", *TOKENS, "--out", "d/trie").status == 0
    assert treepack("advantages", "d/trie", "--estimator", "rloo", "--out", "d/advantages").status == 0
    assert treepack("pack", "d/advantages", "--capacity", "2k", "--out", "d/packed").status == 0
    monkeypatch.chdir(tmp_path / "all")
    done = treepack("prepare", *TOKENS, "--advantages", "rloo", "--capacity", 2048, "--workers", 2, "--out", "d")
    assert done.status == 0, done.err
    assert done.err.splitlines()[-1] == "next: treepack train d/packed --model MODEL --loss grpo --out TRAINED"
    assert contents(tmp_path / "all") == contents(tmp_path / "one")
    assert {"trie", "advantages", "packed"} == {path.name for path in (tmp_path / "all" / "d").iterdir()}


def test_without_options_rows_have_the_default_capacity(tmp_path: Path, treepack: Run) -> None:
    done = treepack("prepare", *CHAT, "--out", tmp_path / "d")
    assert done.status == 0, done.err
    assert read_manifest(tmp_path / "d" / "packed")["capacity"] == 16_384
    assert done.err.endswith(f"next: treepack train {tmp_path / 'd' / 'packed'} --model MODEL --out TRAINED\n")
    assert not (tmp_path / "d" / "advantages").exists()


def test_an_output_that_exists_is_refused_before_anything_is_read(tmp_path: Path, treepack: Run) -> None:
    (tmp_path / "d" / "packed").mkdir(parents=True)
    (tmp_path / "d" / "packed" / "mine").touch()
    refused = treepack("prepare", *TOKENS, "--out", tmp_path / "d")
    assert (refused.status, refused.err.count("\n")) == (1, 1)
    assert not (tmp_path / "d" / "trie").exists()


def test_a_wrong_model_is_refused_before_anything_is_written(tmp_path: Path, treepack: Run) -> None:
    refused = treepack("prepare", *TOKENS, "--balance", 2, "--model", "none", "--out", tmp_path / "d")
    assert refused.status == 1
    assert "none: no such config.json" in refused.err
    assert not (tmp_path / "d").exists()


def test_a_step_that_fails_names_the_trie_that_is_complete(tmp_path: Path, treepack: Run) -> None:
    failed = treepack("prepare", *TOKENS, "--capacity", 3, "--out", tmp_path / "d")
    assert (failed.status, failed.err.count("\n")) == (1, 1)
    assert "d/trie is complete, so treepack pack can continue from it" in failed.err
    assert not (tmp_path / "d" / "packed").exists()
    trained = treepack("train", tmp_path / "d", "--model", "none", "--out", tmp_path / "m")
    assert trained.err.endswith(f"; pack it with: treepack pack {tmp_path}/d/trie --out {tmp_path}/d/packed\n")
    shown = treepack("stats", tmp_path / "d")
    assert shown.err.startswith(f"note: {tmp_path}/d is an output of treepack prepare; {tmp_path}/d/trie is read\n")
    assert shown.status == 0
    assert stats(tmp_path / "d") == stats(tmp_path / "d" / "trie")
    (tmp_path / "d").rename(tmp_path / "my data")
    trained = treepack("train", tmp_path / "my data", "--model", "none", "--out", tmp_path / "m")
    assert trained.err.endswith(f": treepack pack '{tmp_path}/my data/trie' --out '{tmp_path}/my data/packed'\n")
    (tmp_path / "my data").rename(tmp_path / "d")
    assert treepack("pack", tmp_path / "d" / "trie", "--out", tmp_path / "d" / "packed").status == 0


def test_a_step_that_fails_names_the_step_to_continue_with(tmp_path: Path, treepack: Run) -> None:
    options = ("--advantages", "grpo", "--capacity", 3, "--out", tmp_path / "d")
    failed = treepack("prepare", *TOKENS, *options)
    assert (failed.status, failed.err.count("\n")) == (1, 1)
    assert failed.err.endswith("d/advantages is complete, so treepack pack can continue from it\n")


def test_no_figure_is_printed_twice(tmp_path: Path, treepack: Run) -> None:
    out = treepack("prepare", *CHAT, "--out", tmp_path / "d").out
    names = [line.split()[0] for line in out.splitlines() if line and line.split()[0] in GLOSSARY]
    assert {"tokens_tree", "por", "tokens_packed", "err"} <= set(names)
    assert len(names) == len(set(names))
    assert out.count("32 conversations") == 1


def test_tree_estimators_name_the_expansion_that_they_cannot_use(tmp_path: Path, treepack: Run) -> None:
    options = ("--expand", "turns", "--advantages", "treerpo", "--out", tmp_path / "d")
    refused = treepack("prepare", *CHAT, *options)
    assert refused.status == 2
    assert "--advantages treerpo follows whole rollouts through the tree, and --expand turns makes a" in refused.err
    assert not (tmp_path / "d").exists()


def test_a_model_makes_rows_even_in_its_time(tmp_path: Path, treepack: Run) -> None:
    done = treepack("prepare", *CHAT, "--model", "qwen3-8b", "--balance", 2, "--out", tmp_path / "d")
    assert done.status == 0, done.err
    manifest = read_manifest(tmp_path / "d" / "packed")
    assert (manifest["capacity"], manifest["options"]["token_pairs"]) == (16_384, 23_552)
    assert "- rows of 16,384 tokens: the usual capacity" in done.out


def test_rows_of_training_steps_are_announced(tmp_path: Path, treepack: Run) -> None:
    for num_steps, counted in ((2, "2 training steps"), (1, "one training step")):
        lines = [
            f'{{"id": "{i}", "step": {i % num_steps}, "tokens": [1, 2, {i}], "mask": [0, 1, 1]}}' for i in range(4)
        ]
        (tmp_path / "r.jsonl").write_text("\n".join(lines))
        done = treepack("prepare", tmp_path / "r.jsonl", "--out", tmp_path / "d", "--overwrite")
        assert f"- rows of {counted}, which train keeps in order, so it refuses --mix for them" in done.out
    plain = treepack("prepare", *CHAT, "--out", tmp_path / "plain")
    assert "training steps" not in plain.out


PART_OF_COMMAND = {
    "pack data --out packed": "advantages",
    "advantages data --estimator dr_grpo --out advantages": "trie",
    "stats data": "packed",
    "show data": "packed",
    "report data --out page.html": "packed",
    "simulate allocation data --steps 2 --persistence 0": "trie",
}


def test_the_next_command_names_the_loss_of_the_advantages(tmp_path: Path, treepack: Run) -> None:
    rollouts = write_rollouts(tmp_path / "rollouts.jsonl")
    for estimator, loss in (("dr_grpo", "dr_grpo"), ("rloo", "grpo")):
        done = treepack("prepare", rollouts, "--advantages", estimator, "--out", tmp_path / "d", "--overwrite")
        assert done.err.endswith(f"--model MODEL --loss {loss} --out TRAINED\n"), done.err


def test_an_output_stands_for_the_directory_in_it_that_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, treepack: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    rollouts = write_rollouts(tmp_path / "rollouts.jsonl")
    assert treepack("prepare", rollouts, "--advantages", "grpo", "--out", "data").status == 0
    for command, part in PART_OF_COMMAND.items():
        done = treepack(*command.split())
        assert done.err.startswith(f"note: data is an output of treepack prepare; data/{part} is read\n"), done.err
        assert done.status == 0, command


def test_a_folder_that_has_rollouts_too_does_not_stand_for_its_trie(tmp_path: Path, treepack: Run) -> None:
    rollouts = write_rollouts(tmp_path / "rollouts.jsonl")
    assert treepack("build-trie", rollouts, "--out", tmp_path / "trie").status == 0
    assert prepared_part(tmp_path, TRIE, alone=True) == tmp_path
    assert prepared_part(tmp_path, TRIE) == tmp_path / "trie"
    rollouts.unlink()
    assert prepared_part(tmp_path, (*PACKED, *TRIE), alone=True) == tmp_path / "trie"
    # What treepack writes beside it is no rollout.
    assert treepack("pack", tmp_path / "trie", "--out", tmp_path / "more").status == 0
    drawn = ("--out", tmp_path / "report.html", "--png", tmp_path / "pictures")
    assert treepack("report", tmp_path / "more", *drawn).status == 0
    assert prepared_part(tmp_path, TRIE, alone=True) == tmp_path / "trie"
    (tmp_path / "notes").mkdir()
    assert prepared_part(tmp_path, TRIE, alone=True) == tmp_path
    assert prepared_part(tmp_path / "trie", TRIE) == tmp_path / "trie"


def test_a_function_takes_an_output_as_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, treepack: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    rollouts = write_rollouts(tmp_path / "rollouts.jsonl")
    assert treepack("prepare", rollouts, "--advantages", "grpo", "--out", "data").status == 0
    assert stats("data") == stats("data/packed")
    assert check("data", trie="data/advantages") == check(Path("data/packed")) | {"against_trie": True}
    assert PackedDataset("data").path == PackedDataset(Path("data")).path == Path("data/packed")
    assert pack_trie("data", "again", PackOptions(capacity=64)).manifest["trie"]["path"] == "data/advantages"
    assert write_advantages("data", "rated", AdvantageOptions("rloo")).manifest["trie"]["path"] == "data/trie"
    assert write_report("data", page="page.html").page == Path("page.html")
    assert refusal(check, "data", trie="data").startswith("data/trie: is not the trie that data/packed was packed from")

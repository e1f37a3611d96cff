"""Directories whose hashes are right and whose content is wrong: every command works or refuses them in one sentence.

The commands run below the net that reports unforeseen exceptions, so such an exception fails the test.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from support.directory_damage import manifest_cases, part_cases, rewritten, with_value, write_directories
from support.fuzzed_commands import guarded, outcome
from treepack.data.dataset import PackedDataset
from treepack.objectives.denominators import check_columns, trajectory_table
from treepack.objectives.objective import Objective

SEED = 41
TRIE_COMMANDS = [
    "stats {}",
    "stats {} --check",
    "stats {} --effective-ratio --capacity 24",
    "show {}",
    "show {} --group g1",
    "show {} --trajectory r3 --json",
    "pack {} --capacity 24 --out {out}",
    "pack {} --capacity 24 --semantics once --out {out}",
    "pack {} --capacity 24 --method sequence --normalize group --out {out}",
    "pack {} --capacity 6 --too-long truncate --out {out}",
    "pack {} --capacity 24 --leaf-weights --out {out}",
    "pack {} --capacity 24 --partitions 3 --out {out}",
    "pack {} --capacity 24 --method greedy-online --balance 2 --out {out}",
    "advantages {} --estimator grpo --out {out}",
    "advantages {} --estimator treepo --edges --out {out}",
    "advantages {} --estimator treerl --segment recorded --out {out}",
    "advantages {} --estimator gae --out {out}",
    "report {} --out {out}.html",
]
PACKED_COMMANDS = [
    "stats {}",
    "stats {} --check",
    "stats {} --check --trie {trie}",
    "show {}",
    "show {} --row 1 --json",
    "show {} --trajectory r3",
    "augment {trie} --packed {} --out {out}.jsonl",
    "dataset {}",
    "dataset {}",
    "report {} --out {out}.html",
]
RARE = "report"  # takes longer than the others


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    write_directories(folder)
    return folder


def read_dataset(directory: Path) -> None:
    """Read all that training reads of a packed directory."""
    dataset = PackedDataset(directory, terms=True, routes=True)
    for _ in dataset:
        pass
    dataset.max_position()
    for loss, denominator in (("grpo", "trajectory"), ("grpo", "edge"), ("dpo", "token"), ("value", "token")):
        objective = Objective(loss, denominator=denominator)
        check_columns(dataset, objective)
        trajectory_table(dataset, objective)


def run(command: str, directory: Path, folder: Path) -> str:
    if command.startswith("dataset"):
        return guarded(lambda: read_dataset(directory), command)
    names = {"out": str(folder / "out"), "trie": str(folder / "trie")}
    arguments = [part.format(str(directory), **names) for part in command.split()]
    return outcome(*arguments, *(["--overwrite"] if "--out" in arguments else []))


def chosen(commands: list[str], rng: random.Random) -> list[str]:
    """Two commands; the slow one is rare."""
    usual = [command for command in commands if not command.startswith(RARE)]
    return rng.sample(commands if rng.random() < 0.05 else usual, 2)


@pytest.mark.parametrize("share", range(8))
@pytest.mark.parametrize("count", [5, pytest.param(30, marks=pytest.mark.slow)], ids=["some", "many"])
def test_parts_of_other_types_lengths_and_values_are_read_or_refused(
    folder: Path, tmp_path: Path, count: int, share: int
) -> None:
    """240 cases of all columns; eight shares, so that they can run side by side."""
    rng = random.Random(SEED)
    cases = rng.sample(part_cases(), 1200)[share::8][:count]
    results, faults = [], []
    for number, case in enumerate(cases):
        own = random.Random(f"{SEED} {share} {number}")
        for command in chosen(PACKED_COMMANDS if case.kind == "part" else TRIE_COMMANDS, own):
            directory = rewritten(case, folder, tmp_path / "case", routes="--partitions" not in command)
            if directory is None:
                continue
            try:
                results.append(run(command, directory, folder))
            except AssertionError as error:
                faults.append(f"{case}: {error}")
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults)
    assert results.count("refused") > len(results) / 3


@pytest.mark.parametrize("share", range(8))
@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.slow)], ids=["some", "many"])
def test_manifests_with_wrong_values_are_read_or_refused(folder: Path, tmp_path: Path, count: int, share: int) -> None:
    """480 cases: odd values at places of two manifests, with the hash that fits them."""
    cases: list[Any] = [*manifest_cases(folder)]
    random.Random(SEED).shuffle(cases)
    results, faults = [], []
    for number, case in enumerate(cases[share::8][:count]):
        own = random.Random(f"{SEED} {share} {number}")
        directory = with_value(case, folder, tmp_path / "case")
        (command,) = chosen(PACKED_COMMANDS if case.directory == "packed" else TRIE_COMMANDS, own)[:1]
        try:
            results.append(run(command, directory, folder))
        except AssertionError as error:
            faults.append(f"{case}: {error}")
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults)
    assert results.count("refused") > len(results) / 3

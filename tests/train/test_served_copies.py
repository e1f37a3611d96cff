"""Saved copies of all families, read by transformers 4.57 and by the transformers of the trainer."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.model_table import ACCEPTED, CHANGED_SINCE_OLDER, LACKED_BY_OLDER, UNREAD_FROM_OLDER
from support.older_transformers import TOKENS, read
from support.oracle_model import packed_directory
from support.paths import ROOT, TESTS
from support.strategies import make
from support.tiny_families import save_family
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.setup.opening import open_run

pytestmark = pytest.mark.served

PYTHON = ROOT / ".venv-served" / "bin" / "python"
OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, steps=1, checkpoint_every=0, attention="reference")


def slug(name: str) -> str:
    return name.replace(" ", "-").replace(",", "")


FAMILIES = {slug(family.name): family for family in ACCEPTED}
ABSENT, NOT_READ, CHANGED = (
    set(map(slug, names)) for names in (LACKED_BY_OLDER, UNREAD_FROM_OLDER, CHANGED_SINCE_OLDER)
)
KINDS = {name: {"kind": family.kind, **family.options} for name, family in FAMILIES.items()}


def older(action: str, folder: Path, value: Any) -> dict[str, Any]:
    program = [str(PYTHON), str(TESTS / "support" / "older_transformers.py"), action, str(folder)]
    done = subprocess.run(program, input=json.dumps(value), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def reasons(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str | None]]:
    folder = tmp_path_factory.mktemp("models")
    return folder, older("make", folder, KINDS)


@pytest.fixture(scope="module")
def copies(reasons: tuple[Path, dict[str, str | None]]) -> tuple[Path, dict[str, Any], dict[str, str]]:
    """Train each model for a step; return the copies' folder, the trainer's log-probabilities, and refusals."""
    folder, made = reasons
    generator = np.random.default_rng(0)
    rows = [make(f"t{i}", [1, 2, 3 + i % 2, *generator.integers(5, 49, 6).tolist()]) for i in range(4)]
    packed = packed_directory(folder / "packed", rows, capacity=32)
    values: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, reason in made.items():
        try:
            run = open_run(packed, folder / name, OPTIONS)
        except Exception as error:
            if reason is None:
                refused[name] = str(error)
            shutil.rmtree(folder / name, ignore_errors=True)
            save_family(FAMILIES[name].kind, folder / name, **FAMILIES[name].options)
            run = open_run(packed, folder / name, OPTIONS)
        for _ in train(run, folder / "copies" / name):
            pass
        model = run.loaded.model.eval()
        model.set_attn_implementation("eager")
        with torch.no_grad():
            values[name] = model(torch.tensor(TOKENS), use_cache=False).logits[0].log_softmax(-1)
    return folder, values, refused


def test_every_file_but_the_weights_is_the_source_s(copies: tuple[Path, dict[str, Any], dict[str, str]]) -> None:
    folder, values, refused = copies
    assert refused.keys() == NOT_READ
    assert values.keys() == FAMILIES.keys()
    for name in values:
        for path in (each for each in (folder / name).iterdir() if each.suffix == ".json" and "index" not in each.name):
            assert (folder / "copies" / name / path.name).read_bytes() == path.read_bytes(), (name, path.name)


@pytest.mark.parametrize("reader", ["4.57", "today"])
def test_copies_give_the_log_probabilities_of_the_trainer(
    copies: tuple[Path, dict[str, Any], dict[str, str]], reader: str
) -> None:
    folder, values, _ = copies
    names = sorted(values.keys() - (ABSENT | NOT_READ | CHANGED if reader == "4.57" else set()))
    found = older("read", folder / "copies", names) if reader == "4.57" else read(folder / "copies", names)
    wrong = {name: value for name, value in found.items() if isinstance(value, str)}
    assert wrong == {}
    errors = {name: float((torch.tensor(found[name]) - values[name]).abs().max()) for name in names}
    assert {name: error for name, error in errors.items() if error > 1e-5} == {}


def test_the_families_that_the_older_transformers_lacks_are_these(
    reasons: tuple[Path, dict[str, str | None]],
) -> None:
    assert {name for name, reason in reasons[1].items() if reason is not None} == ABSENT


def test_families_that_differ_do_so_before_training(reasons: tuple[Path, dict[str, str | None]]) -> None:
    old, new = older("read", reasons[0], sorted(CHANGED)), read(reasons[0], sorted(CHANGED))
    assert all((torch.tensor(old[name]) - torch.tensor(new[name])).abs().max() > 1e-5 for name in CHANGED)

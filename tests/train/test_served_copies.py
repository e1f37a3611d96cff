"""Saved copies of all families, read by transformers 4.57 and by the transformers of the trainer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.model_table import ACCEPTED
from support.older_transformers import TOKENS, read
from support.oracle_model import packed_directory
from support.paths import ROOT, TESTS
from support.strategies import make
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.setup.opening import open_run

pytestmark = pytest.mark.served

PYTHON = ROOT / ".venv-served" / "bin" / "python"
OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, steps=1, checkpoint_every=0, attention="reference")
FAMILIES = {family.name.replace(" ", "-").replace(",", ""): family for family in ACCEPTED}
ABSENT = set(
    "DeepSeek-V3.2 GLM-4.7-Flash GLM-5 Gemma-4 Granite-4 InternLM-3 K-EXAONE Kimi-Linear LFM2-MoE LFM3 Ling-3 "
    "MiMo-V2-Flash MiniCPM-3 MiniMax-M2 Ministral-3 Nemotron-H-Nemotron-3 OLMo-Hybrid Qwen-3.5-3.6 Qwen-3.5-3.6-MoE "
    "Trinity Zamba-2".split()
)
# A source of 4.57 that transformers 5.24 cannot read, with other shapes or another class.
NOT_READ = {"DeepSeek-V3-R1-Kimi-K2", "Gemma-3n"}
# Families whose source, untrained, gives other log-probabilities in 4.57 than in 5.24.
CHANGED = {"Apertus", "Bamba", "OLMo-3"}
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
    for name in (name for name, reason in made.items() if reason is None):
        try:
            run = open_run(packed, folder / name, OPTIONS)
        except Exception as error:
            refused[name] = str(error)
            continue
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
    for name in values:
        for path in (each for each in (folder / name).iterdir() if each.suffix == ".json" and "index" not in each.name):
            assert (folder / "copies" / name / path.name).read_bytes() == path.read_bytes(), (name, path.name)


@pytest.mark.parametrize("reader", ["4.57", "today"])
def test_copies_give_the_log_probabilities_of_the_trainer(
    copies: tuple[Path, dict[str, Any], dict[str, str]], reader: str
) -> None:
    folder, values, _ = copies
    names = sorted(values.keys() - (CHANGED if reader == "4.57" else set()))
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

"""Wrong input is refused before torch is imported; a missing torch is one sentence, and its allocator is set."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest

from support.paths import ROOT
from support.wrong_inputs import WRONG_INPUTS, write_inputs
from treepack.errors import install_hint, torch_hint

# Runs commands in one process: with "absent" torch is not installed, else it can be found and fails when imported.
PROGRAM = """
import importlib.abc, importlib.machinery, json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

commands, mode = json.loads(sys.argv[1]), sys.argv[2]

class Found(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "torch" else None
    def exec_module(self, module):
        raise AssertionError("torch was imported")

if mode == "absent":
    sys.modules["torch"] = None
else:
    sys.meta_path.insert(0, Found())

import treepack_cli

answers = []
for command in commands:
    sys.argv, err = ["treepack", *command.split()], StringIO()
    with redirect_stderr(err), redirect_stdout(StringIO()):
        try:
            treepack_cli.main()
        except SystemExit as stop:
            answers.append([stop.code, err.getvalue()])
print(json.dumps(answers))
"""


def run(commands: list[str], mode: str, folder: Path) -> dict[str, tuple[int, str]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands), mode],
        cwd=folder,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    answers = json.loads(done.stdout)
    assert len(answers) == len(commands)
    return {command: (status, err) for command, (status, err) in zip(commands, answers, strict=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("wrong"))


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, tuple[int, str]]:
    return run([*WRONG_INPUTS], "found", folder)


@pytest.mark.parametrize("command", WRONG_INPUTS)
def test_wrong_input_is_refused_before_torch_is_imported(
    answers: dict[str, tuple[int, str]], folder: Path, command: str
) -> None:
    status, err = answers[command]
    expected = WRONG_INPUTS[command].replace("{folder}", str(folder))
    assert (status, err.splitlines()[-1]) == (1, f"treepack: {expected}")


RIGHT = [
    "train data --model m.json --out x",
    "train data --model m.json --verify",
    "logprobs data --model m.json --out x",
    "critic data --model critic --out x",
    "values fit data --model m.json --out x",
    "rollout rollouts.jsonl --engine m.json --sampler independent --out x.jsonl",
]


REMEDY = f"needs torch, which is not installed; {torch_hint()}"


@pytest.fixture(scope="module")
def without_torch(folder: Path) -> dict[str, tuple[int, str]]:
    return run(RIGHT, "absent", folder)


@pytest.mark.parametrize("command", RIGHT)
def test_a_missing_torch_is_one_sentence(without_torch: dict[str, tuple[int, str]], command: str) -> None:
    status, err = without_torch[command]
    words = command.split()
    name = "a model in this process" if words[0] == "rollout" else "treepack " + " ".join(words[: 1 + ("fit" in words)])
    assert (status, err.splitlines()[-1]) == (1, f"treepack: {name} {REMEDY}")
    assert "importing torch" not in err


def test_a_public_name_says_that_torch_is_missing() -> None:
    program = "import sys; sys.modules['torch'] = None; import treepack\ntreepack.load_model"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == f"treepack.errors.TreepackError: treepack.load_model {REMEDY}"


def test_a_remedy_names_the_packages_of_an_extra_with_their_bounds() -> None:
    assert re.fullmatch(r"run pip install 'torch>=[\d.]+'.*", install_hint("train"))
    assert re.fullmatch(r"run pip install 'flash-linear-attention==[\d.]+'", install_hint("fla"))
    assert "https://pytorch.org" in torch_hint()


def test_a_missing_path_is_refused_before_the_readers_are_imported(folder: Path) -> None:
    commands = ["stats x", "show x", "report x --out y.html", "build-trie x --out y", "prepare x --out y"]
    program = PROGRAM + 'assert not {"polars", "pyarrow", "numpy"} & sys.modules.keys()\n'
    arguments = [sys.executable, "-c", program, json.dumps(commands), "absent"]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=True)
    refusal = "treepack: x: no such file or folder, and no glob that matches one; check the path\n"
    assert json.loads(done.stdout) == [[1, refusal]] * len(commands)


stages = import_module("treepack_cli.stages")


NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
    ],
    ids=["nothing", "new name", "old name"],
)
def test_segments_can_grow_unless_the_environment_says_otherwise(
    given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "before")  # so that pytest removes the value of the command
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with click.Context(click.Command("train")):
        stages.import_torch()
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == expected

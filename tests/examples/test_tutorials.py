"""The tutorial, the loop of commands and the notebook run as they stand."""

from __future__ import annotations

import ast
import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import run_notebook
import torch
from packaging.requirements import Requirement

from support.command_line import Run
from support.paths import ROOT
from treepack import load_model, make_batch
from treepack.model.forward import row_logprobs
from treepack.pack.files import read_rows

PAGE = (ROOT / "docs" / "first-loop.md").read_text()


def pass_rate(path: Path) -> float:
    rewards = [json.loads(line)["reward"] for line in path.read_text().splitlines()]
    assert len(rewards) == 400
    return float(sum(rewards) / len(rewards))


@pytest.mark.slow
def test_the_commands_of_the_page_make_the_model_better(tmp_path: Path) -> None:
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    # The first block of commands is a summary without arguments.
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1:]
    assert [language for language, _ in blocks] == ["python", "sh", "sh", "sh", "sh"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    for language, text in blocks:
        command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    before, after = (pass_rate(tmp_path / f"{name}.jsonl") for name in ("before", "after"))
    assert 0.4 < before < 0.75
    assert after > before + 0.15


SERVER = "http://localhost:8000"


def blocks(language: str) -> list[str]:
    section = (ROOT / "docs" / "tree-rl.md").read_text().partition("\n### With commands and a server\n")[2]
    return re.findall(rf"^```{language}\n(.*?)^```$", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def sampler_gap(packed: str, model: str) -> float:
    """Return the largest difference between recorded log-probabilities of rows and those of `model`."""
    loaded, gap = load_model(model), 0.0
    for row in read_rows(packed):
        batch = make_batch(row)
        assert batch.terms is not None
        assert batch.terms.sampling_logprob is not None
        with torch.no_grad():
            logprobs, _ = row_logprobs(loaded, batch, batch.terms.tokens, temperature=0.7)
        gap = max(gap, float((logprobs[batch.terms.index] - batch.terms.sampling_logprob).abs().max()))
    return gap


@pytest.mark.slow
def test_two_steps_of_commands_run_as_they_stand(
    treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    monkeypatch.chdir(tmp_path)
    (program,), (first,) = blocks("python"), blocks("sh")
    subprocess.run([sys.executable, "-c", program], check=True)
    model = "sample_data/tiny-qwen3.json"
    # The next step, as the page describes it.
    second = first.replace("step-1", "step-2").replace("--step 1 --seed 1", "--step 2 --seed 2")
    second = second.replace(model, "step-1/policy")
    for served, text in ((model, first), ("step-1/policy", second)):
        commands = text.replace("\\\n", "").splitlines()
        assert [line.split()[1] for line in commands] == ["rollout", "build-trie", "advantages", "pack", "train"]
        for line in commands:
            # A model in this process in place of a server of the same model.
            name, *arguments = shlex.split(line.replace(SERVER, served))
            done = treepack(*arguments, *(["--device", "cpu"] if arguments[0] in ("rollout", "train") else []))
            assert (name, done.status) == ("treepack", 0), f"{line}: {done.err}"
            # The warning about a sampler that is not the policy.
            assert "the sampler's recorded log-probabilities differ" not in done.err
    for step in (1, 2):
        assert {record["step"] for record in lines(f"step-{step}/rollouts.jsonl")} == {step}
    # The second step was sampled from the first one's model, and not from the model that the first one started with.
    assert sampler_gap("step-2/packed", "step-1/policy") < 1e-5
    assert sampler_gap("step-2/packed", model) > 1e-3
    (figures,) = lines("step-2/policy/metrics.jsonl")
    assert figures["importance"] == pytest.approx(1, abs=1e-6)
    assert Path("step-1/policy/model.safetensors").read_bytes() != Path("step-2/policy/model.safetensors").read_bytes()


PATH = ROOT / "examples" / "first_hour.ipynb"


MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


NOTEBOOK = json.loads(PATH.read_text(encoding="utf-8"))


def number(word: str) -> float | None:
    try:
        return float(word.replace(",", ""))
    except ValueError:
        return None


def site_of_demo(folder: Path) -> Path:
    """Fill a folder with links to the packages that `make demo` installs, and to no others."""
    rule = re.findall(r"run\.stamp:.*?\n\n", MAKEFILE, re.DOTALL)[0]
    extras = re.findall(r"'\.\[([\w,]+)\]'", rule)[0]
    waiting, known = [("treepack", extra) for extra in extras.split(",")], set()
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in known:
            continue
        known.add((name, extra))
        package = distribution(name)
        for entry in {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            link = folder / entry
            if not link.exists() and not entry.startswith("__editable__") and not entry.endswith(".pth"):
                link.symlink_to(str(package.locate_file(entry)))
        for line in package.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, each) for each in ("", *requirement.extras)]
    return folder


@pytest.mark.slow
def test_cells_print_and_draw_what_is_stored_in_the_environment_of_make_demo(tmp_path: Path) -> None:
    (site := tmp_path / "site").mkdir()
    copy = tmp_path / PATH.name
    shutil.copy(PATH, copy)
    paths = os.pathsep.join(map(str, (site_of_demo(site), ROOT)))
    # Without the module `site`, the environment of the tests is not on the path.
    command = [sys.executable, "-S", str(ROOT / "tools" / "run_notebook.py"), str(copy)]
    run = subprocess.run(
        command, cwd=PATH.parent, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    num_pictures = 0
    for cell, again in zip(
        run_notebook.code_cells(NOTEBOOK),
        run_notebook.code_cells(json.loads(copy.read_text(encoding="utf-8"))),
        strict=True,
    ):
        stored, words = ("".join(printed(each)).split() for each in (cell, again))
        # Losses differ in the last digits from machine to machine; everything else is equal.
        assert [word for word in words if number(word) is None] == [word for word in stored if number(word) is None]
        values, expected = ([x for word in each if (x := number(word)) is not None] for each in (words, stored))
        assert values == pytest.approx(expected, rel=0.03)
        assert len(pictures(cell)) == len(pictures(again))
        assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures(cell) + pictures(again))
        num_pictures += len(pictures(again))
    assert num_pictures == 4


def printed(cell: dict[str, Any]) -> list[str]:
    return [line for out in cell["outputs"] if out["output_type"] == "stream" for line in out["text"]]


def pictures(cell: dict[str, Any]) -> list[str]:
    return [out["data"]["image/png"] for out in cell["outputs"] if out["output_type"] == "display_data"]


def test_every_import_is_installed_by_make_demo(tmp_path: Path) -> None:
    modules = {
        name.split(".")[0]
        for cell in run_notebook.code_cells(NOTEBOOK)
        for node in ast.walk(ast.parse("".join(cell["source"])))
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    } - {"treepack", *sys.stdlib_module_names}
    installed = {path.name.split(".")[0] for path in site_of_demo(tmp_path).iterdir()}
    assert modules == {"numpy", "torch", "vl_convert"}
    assert modules <= installed
    assert "pytest" not in installed


def test_it_reads_looks_packs_and_trains() -> None:
    texts = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown"]
    headings = [line for text in texts for line in text.splitlines() if line.startswith("#")]
    assert headings == ["# The first hour", "## Read", "## Look", "## Pack", "## Train", "## Next"]
    assert (NOTEBOOK["nbformat"], len({cell["id"] for cell in NOTEBOOK["cells"]})) == (4, len(NOTEBOOK["cells"]))


def test_an_error_in_a_cell_names_the_cell() -> None:
    broken = {"cells": [{"cell_type": "code", "source": ["x = 1\n"]}, {"cell_type": "code", "source": ["x / 0"]}]}
    with pytest.raises(ZeroDivisionError) as failed:
        list(run_notebook.run_cells(broken, "broken.ipynb"))
    assert failed.traceback[-1].frame.code.raw.co_filename == "broken.ipynb, code cell 2"

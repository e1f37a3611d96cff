"""The Dockerfile and the check of the wheel: known instructions, and commands that run in a plain environment."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import check_dist
import pytest

from support.paths import ROOT

TEXT = (ROOT / "Dockerfile").read_text()


KNOWN = {"FROM", "ENV", "SHELL", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}


OF_THE_SYSTEM = ("apt-get update", "useradd")  # commands for an image alone


def instructions() -> list[tuple[str, str]]:
    """Return the instructions with their arguments; a line that ends with a backslash continues."""
    lines = [line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(" ", 1)[0], " ".join(line.split(" ", 1)[1].split())) for line in joined.splitlines()]


def arguments(name: str) -> list[str]:
    return [argument for instruction, argument in instructions() if instruction == name]


def test_every_instruction_is_known() -> None:
    names = [name for name, _ in instructions()]
    assert names[0] == "FROM"
    assert set(names) == KNOWN
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu\d\d\.\d\d", arguments("FROM")[0])
    assert arguments("USER")[-1] != "root"


def test_what_it_copies_exists_and_is_not_ignored() -> None:
    sources = [source for copy in arguments("COPY") for source in copy.split()[:-1]]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(kept) == sorted(sources)


def test_it_installs_the_torch_of_the_makefile() -> None:
    (pinned,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sum(f"pip install {pinned} " in run for run in arguments("RUN")) == 1


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(["hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_its_commands_run_in_a_plain_environment(tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns("*.so", "__pycache__")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{tmp_path}/opt/venv/bin:{environment['PATH']}"
    folder = tmp_path
    printed = ""
    num_run = 0
    for name, argument in instructions():
        if name == "WORKDIR":
            folder = tmp_path / argument.strip("/")
            folder.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *sources, target = argument.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, folder / target, ignore=left_out)
                else:
                    shutil.copy(ROOT / source, folder / target)
        elif name == "RUN" and not argument.startswith(OF_THE_SYSTEM):
            # Absolute paths of the image are below tmp_path here: /opt/venv -> tmp_path/opt/venv
            command = re.sub(r"(?<= )/(?=opt/|tmp/)", f"{tmp_path}/", argument).replace("python3.12", sys.executable)
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", command],
                cwd=folder, env=environment, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            assert done.returncode == 0, f"{command}\n{done.stdout}"
            printed += done.stdout
            num_run += 1
    assert num_run == len(arguments("RUN")) - len(OF_THE_SYSTEM)
    assert "all correct" in printed


def test_the_demo_of_the_wheel_is_that_of_the_readme() -> None:
    readme = re.findall(r"^\$ (treepack .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert check_dist.demo_commands() == [shlex.split(line) for line in readme]


def test_the_other_python_starts_if_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert check_dist.other_python() is None
    version = tmp_path / ".pyenv" / "versions" / "3.12.9" / "bin" / "python"
    version.parent.mkdir(parents=True)
    version.write_text("#!/bin/sh\necho Python 3.12.9\n")
    version.chmod(0o755)
    assert check_dist.other_python() == str(version)


def test_a_step_that_fails_shows_its_command_and_output() -> None:
    with pytest.raises(check_dist.StepError, match=r"(?s)import sys.*no such thing"):
        check_dist.call(sys.executable, "-c", "import sys; sys.exit('no such thing')")


def test_the_sources_have_what_the_demo_needs() -> None:
    words = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines() if not line.startswith("#")]
    folders = {word for name, *others in words if name == "graft" for word in others}
    assert {"sample_data", "examples"} <= folders
    files = [word for name, *others in words if name in ("include", "graft") for word in others]
    assert [name for name in files if not (ROOT / name).exists()] == []

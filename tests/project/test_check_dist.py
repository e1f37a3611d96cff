"""The check of the wheel runs the commands of the README, with a Python that starts."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import check_dist
import pytest

from support.paths import ROOT


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

"""The Makefile: every target is explained, every room has one, and pins are where they are promised."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from support.makefile import run_make, targets
from support.paths import ROOT, TESTS

MAKEFILE = (ROOT / "Makefile").read_text()


def rooms() -> set[str]:
    return {path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}


def dry_run(*words: str) -> str:
    done = run_make("--dry-run", "--always-make", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_programs_keep_their_compiled_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = tmp_path / "shown.mk"
    shown.write_text('shown:\n\t@echo "<$$PYTHONDONTWRITEBYTECODE>"\n')
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert run_make("-f", "Makefile", "-f", str(shown), "shown").stdout == "<>\n"


def test_help_lists_every_target() -> None:
    printed = run_make("help").stdout
    assert set(re.findall(r"^make ([a-z0-9-]+) +\S", printed, re.MULTILINE)) == targets() - rooms()
    (listed,) = re.findall(r"^make ROOM +the tests of one room: ([a-z\s]+)$", printed, re.MULTILINE)
    assert set(listed.split()) == rooms()


@pytest.mark.parametrize("room", ["trie", "ingest", "project"])
def test_a_room_runs_the_tests_of_its_folder(room: str) -> None:
    assert room in targets()
    assert dry_run(room).splitlines()[-1].endswith(f" -m pytest -n auto tests/{room}")


def test_no_room_has_the_name_of_another_target() -> None:
    named = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
    assert named & rooms() == set()


def test_every_marker_of_a_test_group_has_a_target() -> None:
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    groups = [marker.split(":")[0] for marker in markers]
    assert {f"test-{group}" for group in groups} <= targets()


def test_the_target_of_s3_runs_the_files_with_its_mark() -> None:
    (files,) = re.findall(r"-m s3 \$\((.+)\)$", dry_run("test-s3"), re.MULTILINE)
    listed = subprocess.run(["bash", "-c", files], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    marked = [path for path in TESTS.rglob("test_*.py") if re.search(r"pytest\.mark\.s3\b", path.read_text())]
    assert len(listed) > 3
    assert sorted(map(ROOT.joinpath, listed)) == sorted(marked)


def test_the_quick_tests_exist_in_most_rooms() -> None:
    words = dry_run("quick").splitlines()[-1].split()
    paths = [word for word in words if word.startswith("tests/")]
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert {"trie", "pack", "attention", "model", "train"} <= {path.split("/")[1] for path in paths}


def test_the_usual_environment_is_installed_with_exact_versions() -> None:
    lines = [line for line in dry_run("test", "test-s3", "demo").splitlines() if "-e '.[" in line]
    assert len(lines) == 3
    assert all("--constraint constraints.txt" in line for line in lines)


def test_the_exact_versions_satisfy_the_package_and_leave_torch_to_the_makefile() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    exact = {pin.name.lower(): pin for pin in map(Requirement, lines)}
    assert "torch" not in exact
    assert re.search(r"^TORCH \?= torch==\d+\.\d+\.\d+$", MAKEFILE, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["train"], *extras["report"], *extras["dev"], *extras["test-s3"]]
    for each in map(Requirement, needed):
        if each.name == "torch":
            continue
        (pin,) = exact[each.name.lower()].specifier
        assert pin.operator == "=="
        assert Version(pin.version) in each.specifier, each.name


def test_the_slow_group_leaves_out_the_tests_of_all_other_groups() -> None:
    marks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    others = {mark.partition(":")[0] for mark in marks} - {"slow"}
    (left_out,) = re.findall(r"and not \((.+)\)\"", dry_run("test-slow"))
    assert set(left_out.split(" or ")) == others

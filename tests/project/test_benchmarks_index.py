"""The index of benchmarks/ has every script, with the machine that it needs."""

from __future__ import annotations

import re

import pytest

from support.paths import ROOT

FOLDER = ROOT / "benchmarks"
ROWS = re.findall(r"^\| `([\w/]+\.py)` \| (.+) \| (.+) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
SCRIPTS = sorted(
    str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py") if 'if __name__ == "__main__"' in path.read_text()
)


def test_every_script_is_in_the_index_once() -> None:
    assert len(SCRIPTS) > 30
    assert sorted(name for name, *_ in ROWS) == SCRIPTS


@pytest.mark.parametrize(("name", "machine"), [(name, machine) for name, _, machine in ROWS])
def test_a_script_that_the_index_calls_dry_has_a_dry_run(name: str, machine: str) -> None:
    assert re.match(r"(CPU|GPU|up to \d GPUs)\b", machine)
    has_option = '"--dry-run"' in (FOLDER / name).read_text()
    assert machine.endswith(", dry") == has_option

"""The memory that is left on a machine, or in a container that has less."""

from __future__ import annotations

from pathlib import Path

import pytest

from treepack.memory import budget as memory
from treepack.memory.budget import available_memory


@pytest.fixture
def limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "_GROUP_LIMITS", (tmp_path / "memory.max", tmp_path / "absent"))
    monkeypatch.setattr(memory, "_MACHINE", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:    2 kB\n")
    return tmp_path / "memory.max"


def test_a_container_has_its_limit_less_what_it_uses_and_plus_files_in_the_cache(limit: Path) -> None:
    limit.write_text("1000\n")
    (limit.parent / "memory.current").write_text("700\n")
    (limit.parent / "memory.stat").write_text("anon 500\ninactive_file 150\nactive_file 50\n")
    assert available_memory() == 450


@pytest.mark.parametrize("content", [None, "max\n", "1000000000000\n"], ids=["no group", "no limit", "a high limit"])
def test_without_a_limit_it_is_what_the_machine_has_left(limit: Path, content: str | None) -> None:
    if content is not None:
        limit.write_text(content)
        (limit.parent / "memory.current").write_text("700\n")
        (limit.parent / "memory.stat").write_text("")
    assert available_memory() == 2048


def test_other_systems_count_all_memory(limit: Path) -> None:
    (limit.parent / "meminfo").unlink()
    assert available_memory() // 2 == memory.usual_memory()

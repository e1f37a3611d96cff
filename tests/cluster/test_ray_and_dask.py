"""The program for Dask on the page about clusters builds and packs what one process does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.paths import ROOT
from treepack.analysis.check import check
from treepack.trie.directory import build_trie_directory
from treepack.trie.store.trie_files import read_trie

pytestmark = pytest.mark.ray


def test_the_program_of_the_page_runs_on_dask(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    (program,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "dask" in block)
    (tmp_path / "program.py").write_text(program)
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_bytes((ROOT / "sample_data" / "tokens.jsonl").read_bytes())
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    checked = check(tmp_path / "packed")
    assert checked["against_trie"]
    assert done.stdout == f"{checked['tokens_packed']} tokens in {checked['num_rows']} rows\n"
    assert list((tmp_path / "scratch").iterdir()) == []
    build_trie_directory([rollouts], tmp_path / "one")
    one, several = read_trie(tmp_path / "one"), read_trie(tmp_path / "trie")
    assert np.array_equal(one.tokens, several.tokens)
    columns = [name for name in one.trajectories.column_names if name != "source"]
    assert one.trajectories.select(columns).equals(several.trajectories.select(columns))

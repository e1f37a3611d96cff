"""Trie directories for tests."""

from __future__ import annotations

import shutil
from pathlib import Path

from treepack.files.manifest import Provenance
from treepack.trie.store.trie_files import write_trie
from treepack.trie.totals import trie_totals
from treepack.trie.trie import Trie


def saved(trie: Trie, folder: Path) -> Path:
    """Write `trie` with its totals to `folder`, in place of the directory of an earlier example; return `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_trie(trie, folder, Provenance(totals=trie_totals(trie)))
    return folder

"""The targets of the Makefile, as make itself expands them."""

from __future__ import annotations

import re
import subprocess
from functools import cache

from support.paths import ROOT


@cache
def targets() -> frozenset[str]:
    """Return the phony targets, rooms included."""
    printed = subprocess.run(
        ["make", "--print-data-base", "--question", "--no-builtin-rules", "help"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    (line,) = re.findall(r"^\.PHONY: (.+)$", printed, re.MULTILINE)
    return frozenset(line.split())

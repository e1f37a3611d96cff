"""The Makefile, as make itself reads it."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache

from support.paths import ROOT


def run_make(*words: str) -> subprocess.CompletedProcess[str]:
    """Run make in the checkout, without the variables by which an outer make changes what this one prints."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(["make", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@cache
def targets() -> frozenset[str]:
    """Return the phony targets, rooms included."""
    printed = run_make("--print-data-base", "--question", "--no-builtin-rules", "help").stdout
    (line,) = re.findall(r"^\.PHONY: (.+)$", printed, re.MULTILINE)
    return frozenset(line.split())

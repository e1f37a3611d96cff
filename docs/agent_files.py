"""Files for coding agents on the site, made from pages that exist: `make site` writes them, and nothing commits them.

README.md, index.md --llms_text--> llms.txt, the pages with a line about each
README.md, commands --skill_text--> SKILL.md, how to use treepack
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def llms_text() -> str:
    """Return the pages of docs/index.md, by their headings, with a line about each page."""
    text = (ROOT / "docs" / "index.md").read_text().partition("\n\n")[2]
    text = re.sub(r"\n(?: {2,}|(?=[a-z`(]))", " ", text)  # a bullet in one line
    text = re.sub(r"^\*\*(.+)\*\*$", r"## \1", text, flags=re.MULTILINE)
    text = re.sub(r"^(- \[[^]]+\]\([^)]+\)):? ", r"\1: ", text, flags=re.MULTILINE)
    return f"# treepack\n\n> {_summary()}\n\n{text}"


def skill_text() -> str:
    """Return how an agent uses the command line: the programs of README.md, every command, and where to read more."""
    readme, cli = (ROOT / "README.md").read_text(), import_module("treepack_cli")
    programs = "\n".join(re.findall(r"^```sh\n(.*?)^```", readme, re.MULTILINE | re.DOTALL))
    commands = "\n".join(f"- `treepack {name}`: {line}" for name, line in cli.SUMMARIES.items())
    return f"""\
---
name: treepack
description: {_summary()} Use it to measure, prepare and train on rollouts of agents.
---

# treepack

```sh
{programs}```

## Commands

{commands}

## Rules

- Run `treepack COMMAND --help` for the options, in groups; give many of them in a TOML file with `--config FILE`.
- Start with `treepack stats FILES` and `treepack models MODEL`: they print a verdict and write nothing.
- Errors are one sentence with the remedy. Do what it names; do not catch or skip it.
- Every command ends with its outputs and the command that usually comes next. `--json` of
  stats, show, formats and models prints the result for programs.
- Nothing is overwritten without `--overwrite`, and `train --resume` continues a run that ended early.
- `llms.txt` beside this file lists the pages of the documentation.
"""


def _summary() -> str:
    """Return the first paragraph of README.md in one line."""
    return " ".join((ROOT / "README.md").read_text().split("\n\n")[1].split())

"""Count the conversations that each chat template keeps append-only, rewrites, or cannot render faithfully.

    python benchmarks/templates.py [--limit N] [--workers 2]

Every template of trl, with every conversation of tests/rollouts and, if they are there, of public real rollouts
(`support.paths.REAL`), their texts replaced by markers (`support.template_oracle`). Prints the table of
docs/templates.md, and stops if a trained token belongs to another message.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import real_templates, template_stops
from support.conversations import SOURCES, Conversation, real_conversations, samples_of_formats
from support.read_rollouts import tokenize
from support.template_oracle import faults, marked
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trajectory import Skipped

MESSAGES = 64  # of a conversation at most: rendering every turn is quadratic in their number
COLUMNS = "| template | append-only | rewritten | skipped | stops | because |\n|---|---|---|---|---|---|"


@cache
def conversations(limit: int | None) -> list[Conversation]:
    """Return the conversations with markers."""
    return [
        replace(one, item=replace(one.item, content=marked(one.chat, limit=MESSAGES)))
        for one in [*samples_of_formats(), *real_conversations(limit)]
    ]


def stops(tokenizer: Any) -> str:
    """Return the cell of the tokens that stop a sampler, after an answer and after calls."""
    cells = [", ".join(f"`{end}`" if end else "none" for end in dict.fromkeys(found)) for found in _ends(tokenizer)]
    return ", ".join(dict.fromkeys(cells))


def _ends(tokenizer: Any) -> list[list[str]]:
    answers, calling = (template_stops.ends(tokenizer, each) for each in (template_stops.PLAIN, template_stops.CALLING))
    # The first turn of the second conversation is the one with calls.
    return [found for found in (answers, calling and calling[:1]) if found]


def outcome(name: str, limit: int | None) -> tuple[str, Counter[str], Counter[str], str]:
    """Return counts of the outcomes of all conversations with a template, the reasons of its skips, and its stops."""
    outcomes, reasons = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(real_templates.save(name, Path(folder)))
    for one in conversations(limit):
        samples = list(tokenize([one.item], tokenizer=tokenizer, tools=one.tools))
        if wrong := faults(tokenizer, one.chat, samples, one.schemas):
            raise SystemExit(f"{name}: {one.item.source}: {wrong[0]}")
        if isinstance(samples[0], Skipped):
            outcomes["skipped"] += 1
            reasons[samples[0].reason] += 1
        else:
            outcomes["append-only" if len(samples) == 1 else "rewritten"] += 1
    return name, outcomes, reasons, stops(tokenizer)


def table(rows: list[tuple[str, Counter[str], Counter[str], str]]) -> str:
    """Return the table; templates with equal outcomes share a line."""
    names: dict[str, list[str]] = {}
    for name, outcomes, reasons, ends in rows:
        because = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(2))
        cells = [*(f"{outcomes[key]:,}" for key in ("append-only", "rewritten", "skipped")), ends, because]
        names.setdefault(" | ".join(cells), []).append(f"`{name}`")
    return "\n".join([COLUMNS, *(f"| {', '.join(each)} | {cells} |" for cells, each in names.items())])


def main() -> None:
    """Print the conversations, and the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limit", type=int, help="real conversations of each source; default: all")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    names = real_templates.names()
    with ProcessPoolExecutor(arguments.workers) as pool:
        rows = list(pool.map(outcome, names, [arguments.limit] * len(names)))
    sources = Counter(one.source for one in conversations(arguments.limit))
    real = [f"{sources[name]} of {name}" for name in SOURCES if sources[name]]
    samples = sum(count for name, count in sources.items() if name not in SOURCES)
    text = f"{samples} conversations of the samples of all formats" + "".join(f", {part}" for part in real)
    print(f"{text}, trl {version('trl')}\n\n{table(rows)}")


if __name__ == "__main__":
    main()

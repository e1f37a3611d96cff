"""Count the conversations that each chat template keeps append-only, rewrites, or cannot render faithfully.

    python benchmarks/templates.py [--limit N] [--out docs/templates.md] [--workers 2]

Every template of trl, with every conversation of tests/rollouts and, if they are there, of public real rollouts
(`support.paths.REAL`), their texts replaced by markers (`support.template_oracle`). Writes a page in Markdown, and
stops if a trained token belongs to another message.
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
from textwrap import fill
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
INTRODUCTION = """# Chat templates

```sh
treepack stats rollouts/ --tokenizer MODEL                           # which conversations are split or refused?
treepack show rollouts/ --tokenizer MODEL --text --trajectory ID     # is the template right?
treepack build-trie rollouts/ --tokenizer MODEL --chat-template FILE --out trie
```

A template renders a conversation again at every turn. If it only appends, a conversation becomes one sample. If it
rewrites its earlier text, for example drops the reasoning of earlier turns, a new sample starts there: each turn
is trained as its sampler saw it. If it leaves out text that the model wrote, the conversation is skipped and counted.

{conversations}, with each template of trl {trl}, whose names the table has. Use a template
with `--chat-template FILE`; trl's `*_training` templates keep conversations append-only that the original rewrites.
In all of them, trained tokens are the text of the assistant with its reasoning if the template prints it, its calls and
the end of the turn, and belong to no other message (`tests/tokenise/template/test_template_matrix.py`).
`python benchmarks/templates.py` writes the table.

The column stops has the token by which a trained answer stops a sampler, and after a comma that of a turn with calls if
it is another one. Where a template prints no end token, as GLM-4.5's, the marker of the next role is the stop token: it
is trained, also at the end of a conversation. Where no special token ends a turn, the column has none, and a note of
the command names the template.
"""


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
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limit", type=int, help="real conversations of each source; default: all")
    parser.add_argument("--out", type=Path, default=Path("docs/templates.md"))
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    names = real_templates.names()
    with ProcessPoolExecutor(arguments.workers) as pool:
        rows = list(pool.map(outcome, names, [arguments.limit] * len(names)))
    sources = Counter(one.source for one in conversations(arguments.limit))
    real = [f"{sources[name]} of {name}" for name in SOURCES if sources[name]]
    samples = sum(count for name, count in sources.items() if name not in SOURCES)
    text = f"{samples} conversations of the samples of all formats" + "".join(f", {part}" for part in real)
    page = INTRODUCTION.format(conversations=text, trl=version("trl"))
    paragraphs = [
        paragraph if paragraph.startswith(("#", "```")) else fill(paragraph, 120) for paragraph in page.split("\n\n")
    ]
    arguments.out.write_text("\n\n".join([*paragraphs, table(rows)]) + "\n", encoding="utf-8")
    print(f"{arguments.out}: {len(rows)} templates, {sum(sources.values())} conversations")


if __name__ == "__main__":
    main()

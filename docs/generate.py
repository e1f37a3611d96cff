"""Write the generated parts of the documentation.

    python docs/generate.py              the blocks of PAGES between `<!-- generated: NAME -->` and `<!-- end -->`, and
                                         the table of `treepack models`
    python docs/generate.py --check      only compare them
    python docs/generate.py --site DIR   all pages of the site, and three that only the site has: cli.md is `--help` of
                                         every command, api.md the names that `treepack` offers, formats.md the formats;
                                         and llms.txt and SKILL.md into the folder agents beside DIR

The six-token example is built, packed, written and read back here, so what the page shows is what the files hold.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import agent_files
import click
import numpy as np
import objective_table
import pyarrow as pa
import support_table

import treepack
from treepack.costs.model_cost import read_shape
from treepack.costs.presets import PRESETS
from treepack.files import schema
from treepack.files.manifest import Provenance
from treepack.ingest.readers.fields import rollout_facts as fields
from treepack.ingest.readers.fields import token_fields
from treepack.ingest.readers.fields.rewards import REWARDS
from treepack.ingest.readers.format import KEEPS
from treepack.ingest.readers.registry import all_formats
from treepack.pack.files import read_rows, write_packed
from treepack.pack.plan.planning import plan_rows
from treepack.pack.rows import pack_rows
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie

OPTIONS = {"method": "auto", "semantics": "branch", "normalize": "token", "too_long": "error"}
DOCS = Path(__file__).parent
PAGES = ("../CHANGELOG.md", "coming-from.md", "forecast.md", "format.md", "inputs.md", "models.md", "objectives.md")
FAMILIES = DOCS.parent / "treepack" / "analysis" / "families.json"
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def cli_page() -> str:
    """The help of every command, as a Markdown page."""
    commands = import_module("treepack_cli").commands

    parts = ["# Commands\n\nWritten by `make site` from `--help`.\n"]
    parts.append(f"## treepack\n\n```text\n{_help(commands, None, 'treepack')}\n```\n")
    with _context(commands, None, "treepack") as parent:
        for name in commands.list_commands(parent):
            parts += _help_of_all(commands.get_command(parent, name), parent, f"treepack {name}")
    return "\n".join(parts)


def api_page() -> str:
    """Return signature and docstring of every name that `treepack` offers, as a Markdown page."""
    parts = [
        "# API\n\nWritten by `make site` from the docstrings, without the errors that a function raises. Every name is "
        "imported as `from treepack import NAME`, all other names from their rooms.\n"
    ]
    for name in sorted(treepack.__all__, key=str.casefold):
        if name != "__version__":
            value = getattr(treepack, name)
            text = _without_errors(inspect.cleandoc(value.__doc__ or ""))
            parts.append(f"## {name}\n\n`{value.__module__}`\n\n```text\n{_signature(name, value)}\n\n{text}\n```\n")
    return "\n".join(parts)


def _signature(name: str, value: Any) -> str:
    """Return the signature of a class or function in lines of a page."""
    kind = "class" if inspect.isclass(value) else "def"
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    signature = "" if is_error else str(inspect.signature(value))
    # Annotations are strings: "share: 'str' = 'all'" -> "share: str = 'all'"; the quotes of defaults stay.
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)
    # "options: OnlineOptions = OnlineOptions(capacity=None, ...)" -> "options=OnlineOptions()", "n: int = 0" -> "n=0"
    signature = re.sub(r": (\w+) = \1\([^()]*\)", r"=\1()", signature)
    signature = re.sub(r": (?:str|int|float|bool) = ", "=", signature)
    signature = signature.replace("<factory>", "...").removesuffix(" -> None")
    return "\n".join(textwrap.wrap(f"{kind} {name}{signature}", 116, subsequent_indent="    ", break_long_words=False))


def _without_errors(text: str) -> str:
    """Return a docstring without its section "Raises", which ends at the next line that is not indented."""
    return re.sub(r"\n\nRaises:\n(?: .*\n?|\n(?= ))*", "\n\n", text).strip()


def _help_of_all(command: click.Command, parent: click.Context, path: str) -> list[str]:
    """A section for `command`, and one for each command below it."""
    name = path.rpartition(" ")[2]
    parts = [f"## {path}\n\n```text\n{_help(command, parent, name)}\n```\n"]
    if isinstance(command, click.Group):
        with _context(command, parent, name) as context:
            for below in sorted(command.commands):
                parts += _help_of_all(command.commands[below], context, f"{path} {below}")
    return parts


def _help(command: click.Command, parent: click.Context | None, name: str) -> str:
    with _context(command, parent, name) as context:
        return command.get_help(context)


def _context(command: click.Command, parent: click.Context | None, name: str) -> click.Context:
    # With the settings of the command, because click keeps the help option that it makes first: -h and --help.
    settings = {**command.context_settings, "max_content_width": 100, "terminal_width": 100}
    return click.Context(command, info_name=name, parent=parent, **settings)


def formats_page() -> str:
    """Return the formats of rollouts, with the fields and the information that each keeps, as a Markdown page."""
    return f"""\
# Formats

The formats of rollouts that treepack reads. [Inputs](inputs.md) describes how to name files, and how records become
trajectories. `treepack formats` prints these tables, and `treepack formats NAME` prints one row of them.

## Information that each format keeps

"yes" means: kept if the record contains it. Token ids and log-probabilities come from the sampler; a record without
ids is text, which the chat template of `--tokenizer` renders. A mask marks the trained tokens or messages, if they do
not follow from the roles. Lineage is the task that a rollout belongs to, or the rollout that it branches off.

{_kept()}
## Fields that are read

A field that is in neither of the last two columns is kept as metadata if it is short text or a number. If not, it is
counted as not used.

{_formats()}"""


def filled_page(name: str) -> str:
    """The page `name` with its generated blocks written again."""
    blocks: dict[str, Callable[[], str]] = {
        "nodes": lambda: _columns(schema.node_columns(schema.NODE_OPTIONAL.names)),
        "trajectories": lambda: _columns(schema.trajectory_columns(schema.OPTIONAL.names)),
        "renamed": lambda: _columns(schema.RENAMED),
        "rows": lambda: _columns(schema.ROWS),
        "terms": lambda: _columns(schema.TERMS),
        "queries": lambda: _columns(schema.QUERIES),
        "example": _example,
        "other-names": _other_names,
        "gone": _gone,
        "token-fields": _token_fields,
        "objectives": objective_table.losses,
        "models": _models,
        "accepted-models": support_table.accepted,
        "saved-copies": support_table.copies,
        "refused-models": support_table.refused,
    }
    page = (DOCS / name).read_text()
    return BLOCK.sub(lambda found: found[1] + blocks[found[2]]() + found[3], page)


def _token_fields() -> str:
    shared = {"id": fields.IDS, "group": fields.GROUPS, "step": fields.STEPS, "reward": REWARDS}
    rows = {**token_fields.NAMES, **shared, "weight": ("weight",), "temperature": ("temperature",)}
    lines = ["| what | names |", "|---|---|"]
    lines += [f"| {kind} | {', '.join(f'`{name}`' for name in names)} |" for kind, names in rows.items()]
    return "\n".join(lines) + "\n"


def _formats() -> str:
    lines = ["| format | recognised by | fields used | fields dropped |", "|---|---|---|---|"]
    for each in all_formats():
        used = ", ".join(f"`{field}`" for field in each.used)
        cells = (f"`{each.name}`", each.recognised_by, used, "; ".join(each.dropped) or "none")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _kept() -> str:
    lines = [f"| format | written by | {' | '.join(KEEPS)} |", f"|---|---|{'---|' * len(KEEPS)}"]
    for each in all_formats():
        kept = " | ".join("yes" if keep in each.keeps else "" for keep in KEEPS)
        lines.append(f"| `{each.name}` | {each.program} | {kept} |")
    return "\n".join(lines) + "\n"


def _other_names() -> str:
    lines = ["| here | TRL, transformers | Axolotl | verl |", "|---|---|---|---|"]
    for ours, *names in import_module("treepack_cli.other_names").other_names():
        first = f"`{ours}`" if " --" in ours else ours
        cells = [", ".join(f"`{name}`" for name in cell.split()) for cell in names]
        lines.append(f"| {first} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _gone() -> str:
    gone = import_module("treepack_cli.other_names").GONE
    lines = ["| gone | instead |", "|---|---|", *(f"| {name} | {instead} |" for name, instead in gone.items())]
    return "\n".join(lines) + "\n"


def _models() -> str:
    lines = ["| preset | token | target | 1,000 pairs |", "|---|---|---|---|"]
    for name in PRESETS:
        shape = read_shape(name)
        counts = (shape.per_token / 1e9, shape.output / 1e9, shape.scores / 1e6)
        lines.append(f"| `{name}` | " + " | ".join(f"{count:.3g}" for count in counts) + " |")
    return "\n".join(lines) + "\n"


def _columns(columns: pa.Schema) -> str:
    lines = ["| column | type | meaning |", "|---|---|---|"]
    for field in columns:
        kind = str(field.type).replace("element: ", "").replace("item: ", "") + (
            ", may be null" if field.nullable else ""
        )
        lines.append(f"| `{field.name}` | {kind} | {field.metadata[b'description'].decode()} |")
    return "\n".join(lines) + "\n"


def _example() -> str:
    def rollout(name: str, ids: list[int]) -> Trajectory:
        span = (np.array([2], np.int32), np.array([4], np.int32), np.ones(1))
        return Trajectory(name, f"example.jsonl:{name}", Tokens(np.array(ids, np.int32), *span), group_id="task")

    trie = build_trie([rollout("a", [7, 8, 1, 2]), rollout("b", [7, 8, 3, 4])])
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rows = pack_rows(trie, plan_rows(trie, capacity=8))
        manifest = write_packed(rows, directory, capacity=8, provenance=Provenance(options=OPTIONS))
        (row,) = read_rows(directory)
    lines = ["```text"]
    for field in schema.ROWS:
        value = getattr(row, field.name)
        lines.append(f"{field.name:<16} {value.tolist() if isinstance(value, np.ndarray) else value}")
    # Sizes and hashes depend on the version of pyarrow.
    shown = {name: value for name, value in manifest.items() if name not in ("files", "sha256")}
    return "\n".join([*lines, "```", "", "```json", json.dumps(shown, indent=2, sort_keys=True), "```", ""])


def write_site(out: Path) -> None:
    """Write the pages of docs/ and the three that only the site has into the directory `out`, which is made again."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(DOCS, out, ignore=shutil.ignore_patterns("*.py", "*.txt", "__pycache__"))
    for name, text in (("cli.md", cli_page()), ("api.md", api_page()), ("formats.md", formats_page())):
        (out / name).write_text(text)


def write_agent_files(out: Path) -> None:
    """Write llms.txt and SKILL.md into the directory `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "llms.txt").write_text(agent_files.llms_text())
    (out / "SKILL.md").write_text(agent_files.skill_text())


def main() -> int:
    """Write the blocks of pages or the site, or with `--check` print the names of stale pages."""
    if "--site" in sys.argv:
        pages = Path(sys.argv[sys.argv.index("--site") + 1])
        write_site(pages)
        write_agent_files(pages.with_name("agents"))
        return 0
    texts = {DOCS / name: filled_page(name) for name in PAGES} | {FAMILIES: support_table.families()}
    stale = [path for path, text in texts.items() if path.read_text() != text]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.name} is stale; run `make docs`")
        return 1 if stale else 0
    for path in stale:
        path.write_text(texts[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())

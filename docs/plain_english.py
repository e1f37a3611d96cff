"""Count phrases that a reader must read twice, and comment lines.

    python docs/plain_english.py                   a table for this project, and its groups of files
    python docs/plain_english.py --list PATH ...   every occurrence in some files or folders
    python docs/plain_english.py PATH ...          a table for any Python package, to compare with

It reads docstrings, comments, strings of at least four words (messages) and Markdown without its code. Each pattern
below is a habit to avoid, with the plain word for it. A hit is not always a fault: click has 14 in 10,000 words and
torch.distributed 8, so the aim is few hits, not none.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OWN = ("treepack", "cli", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
CODE = ("treepack", "cli")
# As torchtitan and TRL have; the count of today is lower.
MAX_PER_10_000_WORDS = 8.0
MIN_COMMENT_SHARE = 0.035
MIN_MESSAGE_WORDS = 4

_PLACE = "".join(f"(?<!{word} )" for word in ("case", "cases", "point", "place", "that", "directory", "folder", "file"))
_CLAUSE = "it|they|there|this|that|these|those|one|none|no|nothing|both|all|some|several|given|known|possible|needed"
_VERB = "is|are|has|have|was|were|does|do|can|cannot|may|must"
_DETERMINER = "it|they|this|that|these|those|there|what|nothing|no|none|the|a|an|its|their|then|all|each|every|only|one"
_WHAT = "it|they|is|are|was|were|has|have|had|cannot|can|does|did|no|this|one|none|each|every|all"

PATTERNS = {
    "where (if)": rf"{_PLACE}\bwhere (?:{_CLAUSE}|\w+ (?:{_VERB}))\b",
    "for (because)": rf"[,;:] for (?:{_DETERMINER}|as|in|most|many|such)\b \w+",
    "behind (after)": r"\bbehind\b",
    "least, greatest (smallest, largest)": r"(?<!at )\b(?:least|greatest|dearest|fewest)\b|\bthe most\b",
    "goes on (continues)": r"\bgo(?:es|ing)? on\b|\bwent on\b",
    "anew (again)": r"\banew\b",
    "in all (in total)": r"\bin all\b(?! \w)",
    "told apart (distinguished)": r"\btold apart\b|\btells? (?:them |\w+ )?apart\b",
    "not at all": r"\bnot at all\b",
    "what, without a noun": rf"\b[Ww]hat (?:{_WHAT}|\w+ed|[a-z]+s)\b(?![^.]*\?)",
    "those that": r"\bthose (?:that|which|who|whose|of|in|with|where|for|from|to|on|at)\b",
    "things that speak, stand or lie": r"\b(?:says?|tells?|told|knows?|stands?|stood|lies|lie|lay|lain|laid)\b",
    "is no (is not a)": r"(?<!\b[Tt]here )\b(?:is|are|was|were) no\b(?! (?:longer|more|less|one))",
    "nobody": r"\bnobody\b",
    "of another (from a different)": r"\bof another\b",
    "as many as, as few as": r"\bas (?:many|much|few|little) as\b",
    "at one time (at once)": r"\bat one time\b",
    "also if (even if)": r"\balso (?:if|where|when)\b",
    "by itself (alone)": r"\bby (?:itself|themselves)\b",
    "archaic": r"\b(?:begun|of late|of old|is of|are of|in the way|at hand|thus|whereby|therein|save for|lest|ere)\b"
    r"|\bhand(?:s|ed)? on\b|\bbe(?:ing)? asked\b",
}
# A string, so that no # inside it counts, or a comment: `f("#")  # note` -> `"#"`, then `# note` as the group.
STRING_OR_COMMENT = re.compile(
    r""""{3}(?:\\.|[^\\])*?"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(#[^\n]*)""", re.DOTALL
)
DIRECTIVE = re.compile(r"# (?:noqa|type:|mypy:|pragma:)")
QUESTION = re.compile(r"(?:What|Which|Why|Whether|How)\b")  # a header is a noun phrase or an imperative


class Hit(NamedTuple):
    """One occurrence: the kind of phrase, the line where its text starts, and the words around it."""

    kind: str
    line: int
    words: str


def texts(path: Path) -> Iterator[tuple[int, bool, str]]:
    """Yield line, whether it is a docstring, and text, of everything in a file that a person reads."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, False, re.sub(r"```.*?```", "", source, flags=re.DOTALL)
        return
    docstrings = set()
    for node in ast.walk(ast.parse(source)):  # a docstring comes after the node that has it
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
                yield node.body[0].lineno, True, text
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if is_text and len(node.value.split()) >= MIN_MESSAGE_WORDS:  # type: ignore[attr-defined]
            yield node.lineno, False, node.value  # type: ignore[attr-defined]
    for line, comment in comments(path):
        yield line, False, comment.lstrip("# ")


def comments(path: Path) -> list[tuple[int, str]]:
    """Return line and text of every comment in a Python file; Python's own tokenizer takes ten times as long."""
    source = path.read_text(encoding="utf-8")
    matches = [match for match in STRING_OR_COMMENT.finditer(source) if match[1] is not None]
    return [(source.count("\n", 0, match.start()) + 1, match[1]) for match in matches]


def hits(path: Path) -> tuple[list[Hit], int]:
    """Return the phrases of a file and its number of words; text in backticks counts as one word."""
    matches: list[Hit] = []
    num_words = 0
    for line, is_docstring, text in texts(path):
        plain = " ".join(re.sub(r"`[^`]*`", "x", text).split())
        num_words += len(re.findall(r"[A-Za-z]{2,}", plain))
        if is_docstring and QUESTION.match(plain):
            matches.append(Hit("header that asks", line, plain[:60]))
        for kind, pattern in PATTERNS.items():
            for match in re.finditer(pattern, plain):
                matches.append(Hit(kind, line, plain[max(0, match.start() - 40) : match.end() + 30]))
    return matches, num_words


def files_of(paths: Iterable[Path]) -> list[Path]:
    """Return the Python and Markdown files below `paths`, without the generated pages."""
    every = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [file for file in every if file.suffix in (".py", ".md")]


def comment_share(paths: Iterable[Path]) -> float:
    """Return the share of lines of Python files below `paths` with a comment that is not for a tool."""
    num_lines = num_comments = 0
    for path in files_of(paths):
        if path.suffix == ".py":
            num_lines += path.read_text(encoding="utf-8").count("\n")
            num_comments += sum(not DIRECTIVE.match(comment) for _, comment in comments(path))
    return num_comments / max(num_lines, 1)


def density(paths: Iterable[Path]) -> tuple[float, Counter[str], int]:
    """Return the phrases in 10,000 words below `paths`, their counts by kind, and the number of words."""
    counts: Counter[str] = Counter()
    num_words = 0
    for path in files_of(paths):
        matches, words = hits(path)
        counts.update(hit.kind for hit in matches)
        num_words += words
    return 1e4 * counts.total() / num_words, counts, num_words


def main(argv: list[str]) -> None:
    """Print the table, or with --list every occurrence."""
    arguments = [argument for argument in argv if argument != "--list"]
    paths = [Path(argument) for argument in arguments] or [ROOT / name for name in OWN]
    if "--list" in argv:
        for path in files_of(paths):
            for hit in hits(path)[0]:
                print(f"{path}:{hit.line}: {hit.kind}: ..{hit.words}..")
    total, counts, num_words = density(paths)
    for kind, count in counts.most_common():
        print(f"{kind:<38} {count:>5}  {1e4 * count / num_words:>6.1f}")
    print(f"{'phrases in 10,000 words':<38} {counts.total():>5}  {total:>6.1f}")
    for name in () if arguments else OWN:
        group, of_group, _ = density([ROOT / name])
        print(f"    in {name:<31} {of_group.total():>5}  {group:>6.1f}")
    share = comment_share(paths if arguments else [ROOT / name for name in CODE])
    print(f"lines with a comment: {100 * share:.2f} %")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Names of tools that a chat template prints in an escaped form are found in the text of a turn."""

from __future__ import annotations

import html
import json
from collections.abc import Callable

import pytest

from treepack.tokenise.template.contents import check_answer
from treepack.tokenise.template.rendering import UnfaithfulError

NAMES = ["add", 'say "hi"', "c:\\run", "größe", "search_𝄞", "a<b"]


def turn(name: str) -> dict[str, object]:
    return {"content": "", "tool_calls": [{"function": {"name": name, "arguments": {"n": 1}}}]}


def printed(name: str) -> str:
    return f'<call>{{"name": "{name}", "arguments": {{"n": 1}}}}</call>'


@pytest.mark.parametrize(
    "escape",
    [
        str,
        lambda name: json.dumps(name)[1:-1],
        lambda name: json.dumps(name, ensure_ascii=False)[1:-1],
        html.escape,
    ],
    ids=["raw", "ascii", "json", "html"],
)
@pytest.mark.parametrize("name", NAMES)
def test_an_escaped_name_is_found(name: str, escape: Callable[[str], str]) -> None:
    assert check_answer(turn(name), printed(escape(name)), end="", source="r.jsonl:1") == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_part_of_another_one_is_missing(name: str) -> None:
    longer = json.dumps(f"x{name}y")[1:-1]
    with pytest.raises(UnfaithfulError, match="leaves out tool calls of a turn"):
        check_answer(turn(name), printed(longer), end="", source="r.jsonl:1")

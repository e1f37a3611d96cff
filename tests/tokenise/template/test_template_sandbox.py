"""Templates run without transformers as they run with it: the same text and marks, or the same exception."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from support import real_templates
from support.command_line import Run
from support.paths import SAMPLE_DATA
from treepack.tokenise.template import sandbox
from treepack.tokenise.template.rendering import GENERATION_MARK
from treepack.tokenise.template.sandbox import compiled, plain_message

Message = dict[str, Any]


class Role(StrEnum):
    """A role that is not plain text."""

    USER = "user"


@dataclass
class Turn:
    """A message that is not a dict."""

    role: str
    content: Any


class Model:
    """An object as pydantic has them."""

    def model_dump(self) -> dict[str, Any]:
        """Return its fields."""
        return {"role": "tool", "content": np.float32(0.5)}


CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "f", "arguments": {"key": "<é> & 'x'", "n": [1, None, 2.5]}},
}
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be <b>brief</b>"},
    {"role": "user", "content": [{"type": "text", "text": "Q"}, {"type": "image"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "Why"},
    {"role": "tool", "content": "日本", "tool_call_id": "1"},
    {"role": "assistant", "content": "A", "thinking": "Hm", "reasoning_content": None},
]
RICH: list[Any] = [
    Turn("user", ("a", np.int64(3), np.bool_(False))),
    {Role.USER: Role.USER, "role": Role.USER, "content": np.float64(0.1)},
    {"role": "assistant", "content": np.zeros(2)},
    Model(),
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}}]
VARIABLES: dict[str, Any] = {"bos_token": "<s>", "flag": True, "documents": [{"title": "T", "text": "D"}]}
LOOP = "{% for m in messages %}"
PRINTS_ALL = LOOP + "{{ m }}{{ m | tojson }}{% endfor %}{{ tools | tojson(indent=2) }}{{ documents }}{{ flag }}{{ x }}"


def theirs(text: str, messages: list[Any], *, marks: bool, prompt: bool, tools: Any, variables: dict[str, Any]) -> Any:
    try:
        texts, spans = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=text,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompt,
            **variables,
        )
    except Exception as error:  # a template raises anything
        return type(error), str(error)
    return texts[0], spans[0] if marks else []


def ours(text: str, messages: list[Any], *, marks: bool, prompt: bool, tools: Any, variables: dict[str, Any]) -> Any:
    try:
        template, plain = compiled(text), [plain_message(message) for message in messages]
        rendered, spans = template.render(plain, tools=tools, prompt=prompt, variables=variables)
        return rendered, spans if marks else []
    except Exception as error:  # a template raises anything
        return type(error), str(error)


@pytest.mark.parametrize(
    "text",
    [
        PRINTS_ALL,
        LOOP
        + "{% if loop.index == 2 %}{% continue %}{% endif %}{% if loop.last %}{% break %}{% endif %}x\n{% endfor %}",
        LOOP + "a{% generation %}b{% generation %}{{ m.role }}{% endgeneration %}\nc{% endgeneration %}d{% endfor %}",
        "{%- generation -%} a {%- endgeneration -%} b",
        "  {% if flag %}\n  x\n  {% endif %}\n{{ bos_token }}\n{# note #}\n",
        "{{ raise_exception('no ' ~ bos_token) }}",
        "{{ strftime_now('%Y') }}",
        "{{ dict(a=1, b=messages|length) }}{{ dict.fromkeys(['a'], 2) }}",
        "{{ dict.__class__ }}",
        "{{ dict.mro() }}",
        "{% set ns = namespace(a=1, self=2) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.self }}{{ ns }}{{ ns.b }}",
        "{% set ns = namespace(_a=1) %}",
        "{% set ns = namespace({'__class__': 1}) %}",
        "{% set ns = namespace() %}{% set ns._a = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ messages[0].__class__ }}",
        "{{ ''.join.__globals__ }}",
        "{{ messages | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}",
        "{{ messages | tojson(other=1) }}",
        "{{ nothing.at_all }}",
        "{{ 1 // 0 }}",
        "{% for m in messages %}",
        "{% generation %}",
        "{{ messages[0].content | escape }}{{ '<' | e }}{{ lipsum }}{{ cycler }}",
        "{% if add_generation_prompt %}{{ messages[1].content[0].text }}{% endif %}",
    ],
)
@pytest.mark.parametrize("messages", [MESSAGES, RICH, [], ["text"], [None]])
def test_a_template_gives_what_transformers_gives(text: str, messages: list[Any]) -> None:
    given = copy.deepcopy(messages) if messages is MESSAGES else messages
    for marks, prompt, tools in ((False, True, TOOLS), (False, False, None), (True, False, [])):
        how: dict[str, Any] = {"marks": marks, "prompt": prompt, "tools": tools, "variables": VARIABLES}
        expected, found = theirs(text, messages, **how), ours(text, messages, **how)
        assert _without_names(found) == _without_names(expected)
    assert messages == given


@pytest.mark.parametrize(
    "more",
    [
        {"tools": ["f"]},
        {"variables": {"documents": ["D"]}},
        {"variables": {"documents": None}},
        {"variables": {"messages": []}},
        {"variables": {"x": np.float32(1), "y": object}},
    ],
)
def test_other_inputs_are_treated_as_by_transformers(more: dict[str, Any]) -> None:
    how: dict[str, Any] = {"marks": False, "prompt": True, "tools": None, "variables": {}} | more
    expected, found = theirs(PRINTS_ALL, MESSAGES, **how), ours(PRINTS_ALL, MESSAGES, **how)
    assert found[0] == expected[0]
    assert found == expected or "messages" in how["variables"]  # both name their own function


MARKED = [name for name in real_templates.names() if GENERATION_MARK.search(real_templates.template(name))]


@pytest.mark.parametrize("name", MARKED)
def test_marks_of_real_templates_have_the_spans_of_transformers(name: str) -> None:
    text, turn = real_templates.template(name), [MESSAGES[0], {"role": "user", "content": "Q"}, MESSAGES[-1]]
    how: dict[str, Any] = {"marks": True, "prompt": False, "tools": TOOLS, "variables": {"bos_token": "<s>"}}
    for messages in (turn, turn[1:], [*turn, *turn[1:]], MESSAGES):
        assert ours(text, messages, **how) == theirs(text, messages, **how)


def _without_names(result: tuple[Any, Any]) -> tuple[Any, ...]:
    """Return `result` without the name or the address of an object, which differ: "'a.b.Dict object' has no ..."."""
    return tuple(
        re.sub(r"\S+( object' has|\(\) got|0x\w+)", "", part) if isinstance(part, str) else part for part in result
    )


LOOP = "{% for a in VALUES %}{% for b in VALUES %}{% for c in VALUES %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("values", ["range(99999)", "('x' * 99999)", "range(99999)|map('abs')", "range(99999)|list"])
@pytest.mark.parametrize("before", ["", "{% set numbers = range(99999) %}", "{% for m in messages %}{% endfor %}"])
def test_loops_without_end_are_refused_and_the_next_rendering_is_not(
    values: str, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_ITERATIONS", 1_000_000)
    template = compiled(
        before + "{% if 'loop' in messages[0].content %}" + LOOP.replace("VALUES", values) + "{% endif %}a"
    )
    for _ in range(2):
        with pytest.raises(TemplateError, match="its loops have more than 1,000,000 iterations"):
            template.render([{"role": "user", "content": "loop"}])
        assert template.render([{"role": "user", "content": "b"}])[0] == "a"


def test_loops_of_a_constant_count_whenever_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_ITERATIONS", 150)
    ten = str(list(range(10)))
    with pytest.raises(TemplateError, match="more than 150 iterations"):
        compiled(LOOP.replace("VALUES", ten)).render([])


@pytest.mark.parametrize("condition", ["true", "messages"])
def test_a_template_without_end_ends_a_command_in_one_sentence(
    treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, condition: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sandbox, "MAX_ITERATIONS", 1_000_000)
    loop = LOOP.replace("VALUES", "range(99999)")
    Path("loop.jinja").write_text("{% if " + condition + " %}" + loop + "{% endif %}")
    Path("chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    result = treepack(
        "build-trie",
        "chat.jsonl",
        "--tokenizer",
        SAMPLE_DATA / "tokenizer",
        "--chat-template",
        "loop.jinja",
        "--out",
        "trie",
    )
    assert (result.status, result.err.count("\n")) == (1, 1)
    sentence = "the chat template does not end (its loops have more than 1,000,000 iterations); give another one"
    assert sentence in result.err
    assert not Path("trie").exists()

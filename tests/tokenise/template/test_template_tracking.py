"""Renderings that repeat only what may have changed, against renderings of everything: equal for any template."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from support import real_templates
from support.agent_chats import agent_chat
from support.conversations import samples_of_formats
from support.read_rollouts import tokenize
from support.template_fuzz import CONTENTS, random_messages, random_template
from treepack.tokenise.template import history
from treepack.tokenise.template.recorded_iterations import ConversationMemory
from treepack.tokenise.template.rendering import TemplateSetting, UnfaithfulError, render
from treepack.tokenise.template.sandbox import compiled, plain_inputs, plain_message
from treepack.tokenise.template.tracking import tracked
from treepack.tokenise.template.views import UntrackedTemplate
from treepack.tokenise.tokenization import read_tokenizer
from treepack.trajectory import Chat, Skipped, Tokens, Trajectory

Message = dict[str, Any]
SAMPLE = Path(__file__).parents[3] / "sample_data" / "tokenizer"
TOOLS = [{"type": "function", "function": {"name": "find", "description": "d", "parameters": {"type": "object"}}}]
VARIABLES = {"bos": "<s>", "eos_token": "</s>"}
OTHER = {"role": "assistant", "content": "another answer"}


def outcome(render: Callable[[], Any]) -> Any:
    """Return a rendering, or None if the template raises an error."""
    try:
        return render()
    except Exception:
        return None


def compare(
    text: str, messages: list[Message], tools: Any = None, order: list[int] | None = None
) -> ConversationMemory | None:
    """Compare all renderings of beginnings of `messages`, with another last message too; None if it is untracked.

    A tracked template may raise an error that the template does not, because then it is rendered without tracking.
    """
    template, whole = tracked(text), compiled(text)
    if template is None:
        return None
    messages, other = [plain_message(message) for message in messages], plain_message(OTHER)
    memories, inputs = ConversationMemory(), plain_inputs(tools, VARIABLES)
    for k, prompt, last in product(order or range(1, len(messages) + 1), (True, False), ([], [other])):
        items = [*messages[:k], *last]

        def shared(k: int = k, prompt: bool = prompt, items: list[Message] = items) -> tuple[str, list[Any]]:
            result, marks = template.render(memories, items, num_common=k, prompt=prompt, inputs=inputs)
            return str(result), list(marks)

        try:
            result = outcome(shared)
        except UntrackedTemplate:
            return None
        if result is not None:
            assert result == whole.render(items, tools=tools, prompt=prompt, variables=VARIABLES)
    return memories


def fuzz(seeds: range) -> int:
    """Compare the random templates of `seeds`; return the number of tracked ones."""
    num_tracked = 0
    for seed in seeds:
        order = list(range(1, 9))
        if seed % 3 == 0:  # a conversation is rendered from its beginning to its end, but nothing depends on that
            random.Random(seed).shuffle(order)
        tools = [{"name": "f"}] if seed % 2 else None
        num_tracked += compare(random_template(seed), random_messages(seed, 8), tools, order) is not None
    return num_tracked


def test_random_templates_print_the_same() -> None:
    assert fuzz(range(30)) >= 20


@pytest.mark.slow
def test_many_random_templates_print_the_same() -> None:
    assert fuzz(range(30, 1200)) >= 785


LOOP = "{% for m in messages %}{{ m.role }}:{{ m.content }};"
ENDING = "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
# Templates that print something else in the middle of a conversation when it continues; True if they can be tracked.
DECEIVING = {
    "parity of all messages": ("{% set odd = messages|length % 2 %}" + LOOP + "{{ odd }}" + ENDING, True),
    "count in every message": (LOOP + "{{ messages|length }}" + ENDING, True),
    "distance from the end": (LOOP + "{% if loop.revindex > 3 %}old{% endif %}" + ENDING, True),
    "number of users": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}"
        "{% endif %}{% endfor %}" + LOOP + "{% if ns.n >= 3 %}long{% endif %}" + ENDING,
        True,
    ),
    "the third user changes the first message": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}"
        "{% endif %}{% endfor %}" + LOOP + "{% if loop.first and ns.n > 2 %}long{% endif %}" + ENDING,
        True,
    ),
    "any later message": (
        LOOP + "{% for x in messages[loop.index:] %}{% if x.role == 'user' %}*{% endif %}{% endfor %}" + ENDING,
        True,
    ),
    "the last message, by a filter": (LOOP + "{{ (messages|last).role }}" + ENDING, True),
    "all messages, by a filter": (LOOP + "{{ messages|map(attribute='role')|join }}" + ENDING, True),
    "all messages as text": (LOOP + "{{ messages|string|length }}" + ENDING, False),
    "the length by a method": (LOOP + "{{ messages.__len__() }}" + ENDING, True),  # always refused
    "the number of equal messages": (LOOP + "{{ messages.count(m) }}" + ENDING, False),
    "a hidden counter": ("{% set c = cycler('a', 'b') %}" + LOOP + "{{ c.next() }}" + ENDING, False),
    "a change of role": (LOOP + "{% if loop.changed(m.role) %}!{% endif %}" + ENDING, False),
    "a generator that is used up": (
        "{% set roles = messages|map(attribute='role') %}" + LOOP + "{{ roles|first }}" + ENDING,
        False,
    ),
    "a generator in a list": (
        "{% set roles = [messages|map(attribute='role')] %}" + LOOP + "{{ roles[0]|first }}" + ENDING,
        False,
    ),
    "a loop kept in a namespace": (
        "{% set ns = namespace() %}" + LOOP + "{% set ns.l = loop %}{{ ns.l.length }}" + ENDING,
        False,
    ),
    "the prompt in the loop": (LOOP + "{% if add_generation_prompt %}P{% endif %}" + ENDING, True),
    "the prompt in a namespace": (
        "{% set ns = namespace(p=add_generation_prompt) %}" + LOOP + "{{ ns.p }}" + ENDING,
        True,
    ),
    "the date": (LOOP + "{{ strftime_now('%d') }}" + ENDING, False),
    "chance": (LOOP + "{{ ['a', 'b']|random }}" + ENDING, False),
    "a namespace by a name from a message": (
        "{% set ns = namespace(user='u', assistant=messages|length) %}" + LOOP + "{{ ns[m.role] }}" + ENDING,
        True,
    ),
    "one message from the end, by a namespace": (
        "{% set ns = namespace(n=messages|length - 2) %}" + LOOP + "{{ loop.index0 == ns.n }}{{ ns.n != 4 }}" + ENDING,
        True,
    ),
    "a macro that reads the end": (
        "{% macro end() %}{{ messages[-1].content }}{% endmacro %}" + LOOP + "{{ end() }}" + ENDING,
        True,
    ),
    "a macro that counts": (
        "{% set ns = namespace(n=0) %}{% macro add(k) %}{% set ns.n = ns.n + k %}{{ ns.n }}{% endmacro %}"
        + LOOP + "{{ add(messages|length) }}" + ENDING,
        True,
    ),
    "messages dropped from the middle": (
        "{% for m in (messages[:2] + messages[-2:] if messages|length > 5 else messages) %}{{ m.content }}" + ENDING,
        True,
    ),
    "an earlier message moves to the end": (
        LOOP + "{% if loop.last %}{{ messages[0].content }}{% endif %}" + ENDING,
        True,
    ),
    "a message refused after it was accepted": (
        LOOP + "{% if loop.index0 == 1 and messages|length == 5 %}{{ raise_exception('no') }}{% endif %}" + ENDING,
        True,
    ),
    "reversed messages, by distance": (
        "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% if loop.index0 > 2 and m.role == 'user' %}"
        "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}" + LOOP + "{{ ns.n }}" + ENDING,
        True,
    ),
    "reversed messages, with text": (
        "{% for m in messages[::-1] %}{{ m.role[0] }}{% endfor %}" + LOOP + ENDING,
        True,
    ),
    "reversed messages, with a memory of their own": (
        "{% set ns = namespace(s='') %}{% for m in messages[::-1] %}{% set ns.s = (ns.s ~ m.content)[:3] %}"
        "{% endfor %}" + LOOP + "{{ ns.s }}" + ENDING,
        True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECEIVING)
def test_templates_that_depend_on_later_messages_print_the_same(name: str) -> None:
    text, is_tracked = DECEIVING[name]
    choose = random.Random(1)
    roles = ["system"] + ["user", "assistant", "tool", "assistant"] * 3
    messages = [{"role": role, "content": choose.choice(CONTENTS[-6:]) + str(i)} for i, role in enumerate(roles)]
    assert (compare(text, messages) is not None) == is_tracked
    assert (compare(text, messages[1:], TOOLS) is not None) == is_tracked


def test_variables_with_the_names_of_inputs_are_refused_as_always() -> None:
    messages = agent_chat(10)
    refused: list[dict[str, Any]] = [{"messages": []}, {"add_generation_prompt": True}, {"_treepack_loop": 1}]
    for variables in refused:
        setting = TemplateSetting("s", LOOP + ENDING, None, variables)
        past = history.RenderedHistory(messages, setting)
        if "messages" in variables or "add_generation_prompt" in variables:
            with pytest.raises(UnfaithfulError, match="multiple values"):
                past.prompt(5, setting)
        else:
            assert str(past.prompt(5, setting)) == render(messages[:5], setting, prompt=True)


# Templates of the usual families run each iteration a few times, however long the conversation is.
LINEAR = "sample qwen2_5 qwen3 qwen3_8 deepseekv3 glm4moe_training llama3_1 nemotron_3_super_training".split()


@pytest.mark.parametrize("name", LINEAR)
def test_the_number_of_iterations_is_linear_in_the_number_of_messages(name: str) -> None:
    text = (SAMPLE / "chat_template.jinja").read_text() if name == "sample" else real_templates.template(name)
    messages = [plain_message(message) for message in agent_chat(40, reasoning=True, as_text=name == "deepseekv3")]
    template, memories, inputs = tracked(text), ConversationMemory(), plain_inputs(None, VARIABLES)
    assert template is not None
    for k in range(2, len(messages) + 1):
        for prompt in (True, False):
            template.render(memories, messages[:k], num_common=k, prompt=prompt, inputs=inputs)
    # Three loops over all messages, and some iterations again when a user speaks or the last message changes.
    assert len(messages) - 1 <= memories.num_iterations <= 6 * len(messages)


def identity(sample: Trajectory | Skipped) -> tuple[Any, ...]:
    if isinstance(sample, Skipped):
        return (sample.reason, sample.detail, sample.group_id)
    content = sample.content
    assert isinstance(content, Tokens)
    arrays = (content.tokens, content.starts, content.ends, content.span_weights)
    names = (sample.trajectory_id, sample.group_id, sample.notes, sorted(sample.totals.items()))
    return (*names, *(array.tolist() for array in arrays))


def long_conversations() -> list[Trajectory]:
    """Conversations that are long enough to be tracked, of agents and of every format that has them."""
    chats = [
        Chat(messages, [float(message["role"] == "assistant") for message in messages])
        for messages in (agent_chat(8), agent_chat(9, seed=1, reasoning=True), agent_chat(5, seed=2, tools=False))
    ]
    # An answer with its reasoning inside, an answer that is not trained, and one that a template may leave out.
    messages = [*chats[0].messages, {"role": "user", "content": "?"}]
    messages += [{"role": "assistant", "content": "<think>\nWhy?\n</think>\n\nSo."}]
    chats.append(Chat(messages, [*chats[0].message_weights, 0.0, 2.0]))
    chats.append(replace(chats[1], message_weights=[0.0, *chats[1].message_weights[1:-4], 0.0, 0.0, 0.0, 0.0]))
    formats = [one.item for one in samples_of_formats() if len(one.chat.messages) >= history.MIN_MESSAGES]
    return [Trajectory(f"t{i}", f"made:{i}", chat) for i, chat in enumerate(chats)] + formats[:4]


# The sample tokenizer, rewritten and marked turns, a template whose iterations read all later messages, text arguments.
@pytest.mark.parametrize("name", ["sample", "qwen3", "qwen3_training", "gptoss", "deepseekv3"])
def test_samples_are_those_of_whole_renderings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = read_tokenizer(str(SAMPLE) if name == "sample" else real_templates.save(name, tmp_path))
    items = long_conversations()
    for expand, tools in (("turns", None), ("trajectory", TOOLS)):
        shared = [identity(sample) for sample in tokenize(items, tokenizer=tokenizer, expand=expand, tools=tools)]
        with monkeypatch.context() as patch:
            patch.setattr(history, "MIN_MESSAGES", 10**9)
            whole = [identity(sample) for sample in tokenize(items, tokenizer=tokenizer, expand=expand, tools=tools)]
        assert shared == whole

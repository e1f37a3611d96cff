"""Roles of tokens: headers learned from real chat templates, and every word of a message under its role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import real_templates
from support.report_page import TOKENIZER
from support.strategies import make
from treepack.report.roles import ROLES, TokenRoles, learn_headers, mark_roles
from treepack.report.texts import decoder_of, ids_as_text
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.nodes import paths
from treepack.trie.trie import Trie

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string", "description": "words"}}},
    },
}
CALL = {"name": "look", "arguments": {"query": "walrus"}}
AS_TEXT = {"name": "look", "arguments": '{"query": "walrus"}'}  # as DeepSeek's template needs it
# One word for each message; a template prints none of them by itself.
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "zebra"},
    {"role": "user", "content": "giraffe"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "look00000", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "look00000", "name": "look", "content": "penguin"},
    {"role": "assistant", "content": "ostrich"},
    {"role": "user", "content": "lemur"},
]
WORDS = {"zebra": 1, "giraffe": 2, "walrus": 3, "penguin": 4, "ostrich": 3, "lemur": 2}
WITH_TOOLS = "qwen2_5 qwen3 qwen3_5_think deepseekv3 llama3_1 gptoss glm4moe nemotron_3_nano".split()
TEXT_ONLY = "gemma3 phi3 cohere muse_glimmer".split()


def roles_of(trie: Trie, tokenizer: Any) -> TokenRoles:
    decode = decoder_of(tokenizer)
    return mark_roles(trie, learn_headers(tokenizer), tokenizer.get_added_vocab(), decode)


def words_by_role(trie: Trie, roles: TokenRoles, tokenizer: Any, i: int) -> list[tuple[str, str]]:
    """Return the runs of tokens of one role on the path of trajectory i: the role and the text of each."""
    ids = next(path.copy() for k, path in enumerate(paths(trie.end_node, trie.node_start, trie.depth)) if k == i)
    cuts = np.flatnonzero((np.diff(roles.role[ids]) != 0) | roles.starts[ids][1:]) + 1
    return [(ROLES[roles.role[run[0]]], tokenizer.decode(trie.tokens[run].tolist())) for run in np.split(ids, cuts)]


@pytest.mark.parametrize("name", WITH_TOOLS + TEXT_ONLY)
def test_every_word_has_the_role_of_its_message(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(real_templates.save(name, tmp_path))
    talk = TALK if name in WITH_TOOLS else [TALK[1], TALK[4], TALK[5]]
    if name == "deepseekv3":
        talk = [
            one | ({"tool_calls": [{"type": "function", "function": AS_TEXT}]} if "tool_calls" in one else {})
            for one in talk
        ]
    text = tokenizer.apply_chat_template(talk, tools=[TOOL] if len(talk) == len(TALK) else None, tokenize=False)
    trie = build_trie([make("a", tokenizer.encode(text, add_special_tokens=False))])
    runs = words_by_role(trie, roles_of(trie, tokenizer), tokenizer, 0)
    for word, role in WORDS.items():
        if word in text:
            assert {name for name, run in runs if word in run} == {ROLES[role]}, word
    assert sum(word in text for word in WORDS) == len(talk)


def test_each_message_starts_once_and_with_its_header() -> None:
    tokenizer = load_tokenizer(str(TOKENIZER))
    text = tokenizer.apply_chat_template(TALK, tools=[TOOL], tokenize=False)
    trie = build_trie([make("a", tokenizer.encode(text, add_special_tokens=False))])
    roles = roles_of(trie, tokenizer)
    assert int(roles.starts.sum()) == len(TALK)
    runs = words_by_role(trie, roles, tokenizer, 0)
    assert [role for role, _ in runs] == [message["role"] for message in TALK]
    assert all(run.startswith("<|im_start|>") for _, run in runs)


def test_messages_that_separate_inside_a_header_have_their_own_roles() -> None:
    # Both continue with <|im_start|>user; only then the tool's <tool_response> follows.
    tokenizer = load_tokenizer(str(TOKENIZER))
    start = [TALK[1], {"role": "assistant", "content": "ostrich"}]
    ends = [{"role": "user", "content": "lemur"}], [{"role": "tool", "content": "penguin"}]
    texts = [tokenizer.apply_chat_template(start + end, tokenize=False) for end in ends]
    trie = build_trie([make(f"t{i}", tokenizer.encode(text, add_special_tokens=False)) for i, text in enumerate(texts)])
    assert trie.num_nodes == 3
    roles = roles_of(trie, tokenizer)
    for i, source in enumerate(trie.trajectories["trajectory_id"].to_pylist()):
        word, role = ("lemur", "user") if source == "t0" else ("penguin", "tool")
        assert [name for name, run in words_by_role(trie, roles, tokenizer, i) if word in run] == [role]


def test_roles_are_unknown_without_a_template_and_in_text_that_is_no_conversation() -> None:
    tokenizer = load_tokenizer(str(TOKENIZER))
    plain = build_trie([make("a", tokenizer.encode("The brake squeaks.", add_special_tokens=False))])
    assert set(roles_of(plain, tokenizer).role.tolist()) == {0}
    assert not mark_roles(plain, [], {}, ids_as_text).role.any()
    tokenizer.chat_template = None
    assert learn_headers(tokenizer) == []


def test_a_template_that_refuses_everything_gives_no_header() -> None:
    tokenizer = load_tokenizer(str(TOKENIZER))
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert learn_headers(tokenizer) == []
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert learn_headers(tokenizer) == []  # words of a message could look like these headers

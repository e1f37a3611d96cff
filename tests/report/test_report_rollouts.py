"""Rollouts of a report: lines, outcomes, places of lost sharing, and the roles of their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import real_templates
from support.paths import SAMPLE_DATA
from support.report_page import TOKENIZER
from support.strategies import make
from treepack.costs.model_cost import read_shape
from treepack.ingest.conversation_counts import conversations_of_log
from treepack.ingest.options import BuildOptions
from treepack.report.causes import difference_runs, read_sharing
from treepack.report.contents import read_contents
from treepack.report.figures import MAX_BARS, ReportSubject, count_rewards, group_rates, measure
from treepack.report.page import render_page
from treepack.report.parts import groups_of
from treepack.report.roles import ROLES, TokenRoles, learn_headers, mark_roles
from treepack.report.rollouts import outcomes_of, short_names, sorted_rollouts
from treepack.report.texts import decoder_of, ids_as_text
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.directory import read_to_trie
from treepack.trie.nodes import paths
from treepack.trie.totals import trie_totals
from treepack.trie.trie import Trie


@pytest.mark.parametrize(
    ("names", "models", "labels"),
    [
        (["run/a/task-1", "run/b/task-1"], ["", ""], ["a", "b"]),
        (["desk-005/0", "desk-005/1"], ["", ""], ["#0", "#1"]),
        (["t/leaf-12", "t/leaf-3"], ["", ""], ["leaf-12", "leaf-3"]),
        (["t/0", "t/1"], ["qwen", "llama"], ["qwen #0", "llama #1"]),
        (["t/0", "t/1"], ["qwen", "qwen"], ["#0", "#1"]),
        (["qwen/t", "llama/t"], ["qwen", "llama"], ["qwen", "llama"]),
        (["a/b", "a/b/c"], ["", ""], ["b", "c"]),
        (["file.jsonl:7"], [""], ["#7"]),
    ],
)
def test_names_show_what_differs_inside_a_group(names: list[str], models: list[str], labels: list[str]) -> None:
    assert short_names(names, [{"model": model} if model else {} for model in models]) == labels


def test_rollouts_that_differ_in_temperature_are_told_apart_by_it() -> None:
    made = [make(f"t/{i}", [1, i + 2], temperature=value) for i, value in enumerate((0.5, 1.0))]
    assert sorted_rollouts(build_trie(made)).labels == ["0.5 #0", "1.0 #1"]


def trie_of_outcomes() -> Trie:
    """Group a has the outcomes 1, 0; b 0, 0; c 1 and one that is unknown; d has one rollout of two turns."""
    rewards = {"a0": 1.0, "a1": 0.0, "b0": 0.0, "b1": 0.0, "c0": 1.0, "c1": None}
    made = [make(name, [1, i + 2], group=name[0], reward=reward) for i, (name, reward) in enumerate(rewards.items())]
    return build_trie([*made, *(make(f"d0/turn-{i}", [1, 9, i + 1], group="d", reward=1.0) for i in range(2))])


def test_outcomes_are_of_rollouts_and_the_most_mixed_group_is_opened() -> None:
    trie = trie_of_outcomes()
    groups = groups_of(trie)
    outcomes = outcomes_of(groups, sorted_rollouts(trie))
    assert groups.names == ["a", "b", "c", "d"]
    assert outcomes.num_rollouts.tolist() == [2, 2, 2, 1]
    assert outcomes.spread.tolist() == [0.5, 0, 0, 0]
    assert outcomes.is_one.tolist() == [False, True, False, False]
    assert outcomes.most_mixed(groups.overlap) == 0


def test_pass_rates_are_of_every_group_with_a_reward_in_ascending_order() -> None:
    trie = trie_of_outcomes()
    records = group_rates(groups_of(trie), sorted_rollouts(trie))
    assert [(record["name"], record["rate"], record["is_one"]) for record in records] == [
        ("b", 0, True),
        ("a", 0.5, False),
        ("c", 1, False),
        ("d", 1, False),
    ]
    many = build_trie([make(f"t{i}", [1, i + 2], group=f"g{i:03}", reward=float(i % 2)) for i in range(3 * MAX_BARS)])
    bars = group_rates(groups_of(many), sorted_rollouts(many))
    assert len(bars) == MAX_BARS
    assert sum(int(bar["name"].split()[0]) for bar in bars) == 3 * MAX_BARS
    assert (bars[0]["start"], bars[-1]["end"]) == (0, 1)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, float("nan")]) | st.floats(0, 1), max_size=40))
def test_every_known_reward_is_counted_once(rewards: list[float]) -> None:
    known = sum(not np.isnan(reward) for reward in rewards)
    assert sum(record["count"] for record in count_rewards(np.array(rewards, np.float64))) == known


@given(st.text("ab 1,"), st.text("ab 1,"))
def test_runs_of_a_difference_are_the_texts_and_agree_where_they_say_so(a: str, b: str) -> None:
    first, second = difference_runs(a, b)
    assert ("".join(run.text for run in first), "".join(run.text for run in second)) == (a, b)
    same = [[run.text for run in runs if run.kind == "same"] for runs in (first, second)]
    assert "".join(same[0]) == "".join(same[1])


def test_an_example_names_both_samples_the_place_and_what_is_lost() -> None:
    # The prompts 1 2 3 and 1 4 3 differ from token 1 on; the second loses 4 3.
    made = [
        make("x", [1, 2, 3, 7], spans=[(3, 4, 1.0)]),
        make("y", [1, 4, 3, 8], spans=[(3, 4, 1.0)]),
    ]
    trie = build_trie(made)
    sharing = read_sharing(trie, groups_of(trie).of, None, ids_as_text)
    assert sum(sharing.reasons.values()) == trie.tokens_tree
    (cause,) = sharing.causes
    ids = trie.trajectories["trajectory_id"].to_pylist()
    assert (cause.name, cause.tokens, cause.num_places) == ("prompt differs", 2, 1)
    (example,) = cause.examples
    assert (ids[example.trajectory], ids[example.other], example.position, example.lost) == ("y", "x", 1, 2)
    assert (example.before, [run.text for run in example.expected]) == ("1 ", ["2 ", "3 ", "7 "])
    assert read_sharing(trie, groups_of(trie).of, None, None).causes[0].examples[0].actual == []


def test_a_page_without_text_has_the_causes_but_no_text_of_an_example(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join((SAMPLE_DATA / "chat.jsonl").open().readlines()[:4]))
    tokenizer = load_tokenizer(str(SAMPLE_DATA / "tokenizer"))
    options = BuildOptions(tokenizer=str(SAMPLE_DATA / "tokenizer"), expand="turns")
    trie, log = read_to_trie([tmp_path / "in.jsonl"], options, tokenizer=tokenizer)
    subject = ReportSubject("in.jsonl", trie, conversations=conversations_of_log(log, trie_totals(trie)))
    figures = measure(subject, read_shape("qwen3-8b"))
    pages = [render_page(subject, figures, read_contents(trie, tokenizer, limit=limit)) for limit in (10**6, None)]
    assert all("Only reasoning differs" in page for page in pages)
    assert ["The rules say to look up" in page for page in pages] == [True, False]
    assert all("4 conversations, " in page and "one append-only sequence per conversation" in page for page in pages)


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

"""Reasons for the tokens of a trie, and lost sharing: damage to shared prefixes gets its cause and its cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from support.byte_tokenizer import PLAIN, STRIPPING, save
from support.command_line import Run
from support.paths import ROOT
from support.read_rollouts import tokenize
from support.strategies import make, trajectories
from treepack.analysis.lost_sharing import explain_sharing
from treepack.analysis.text_differences import classify_difference
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trajectory import Chat, Trajectory
from treepack.trie.builders.in_memory import build_trie

# Without a tokenizer a cause only names the part that differs.
CAUSE = {"prompt": "prompt differs", "history": "history differs"}


def report_of(*rollouts: Trajectory, **options: Any) -> dict[str, Any]:
    return explain_sharing(build_trie(rollouts), **options)


def tokens_lost(report: dict[str, Any]) -> dict[str, int]:
    return {cause["cause"]: cause["tokens"] for cause in report["lost"]}


@given(trajectories())
def test_the_reasons_sum_up_to_the_tokens_of_the_trie(rollouts: list[Trajectory]) -> None:
    trie = build_trie(rollouts)
    report = explain_sharing(trie)
    assert sum(report["laid_down"].values()) == trie.tokens_tree
    assert sum(tokens_lost(report).values()) == report["laid_down"]["lost"]
    assert min(report["laid_down"].values()) >= 0


@given(trajectories())
def test_the_order_of_trajectories_changes_nothing(rollouts: list[Trajectory]) -> None:
    assert explain_sharing(build_trie(rollouts)) == explain_sharing(build_trie(rollouts[::-1]))


def test_a_prompt_that_differs_costs_the_tokens_added_again_and_once_for_all_that_have_it() -> None:
    """Prompt of six tokens; b and c have another third token, so four tokens are added again, by b alone."""
    #   a   1 2 3 4 5 6 10      first: 7 tokens
    #   b   1 2 9 4 5 6 11      lost: 9 4 5 6; behind: 11
    #   c   1 2 9 4 5 6 12      shares the prompt of b; sampling: 12
    report = report_of(
        make("a", [1, 2, 3, 4, 5, 6, 10], spans=[(6, 7, 1.0)]),
        make("b", [1, 2, 9, 4, 5, 6, 11], spans=[(6, 7, 1.0)]),
        make("c", [1, 2, 9, 4, 5, 6, 12], spans=[(6, 7, 1.0)]),
    )
    assert report["laid_down"] == {
        "first": 7,
        "sampling": 1,
        "environment": 0,
        "next call": 0,
        "longer prompt": 0,
        "behind": 1,
        "lost": 4,
    }
    (cause,) = report["lost"]
    assert cause == {
        "cause": CAUSE["prompt"],
        "tokens": 4,
        "num_partings": 1,
        "example": {"trajectory_id": "b", "other": "a", "position": 2},
    }


def test_a_call_that_continues_the_call_before_loses_nothing_and_one_that_rewrites_it_does() -> None:
    prompt = [1, 2, 3]
    first = make("r/turn-0", [*prompt, 4, 5], spans=[(3, 5, 1.0)])
    second = make("r/turn-1", [*prompt, 4, 5, 6, 7], spans=[(6, 7, 1.0)])
    shortened = make("r/turn-2", [*prompt, 9, 6, 7, 8], spans=[(6, 7, 1.0)])
    report = report_of(first, second, shortened)
    # The second call adds 6 and 7. The third shares 3 tokens with it and should share 6, its prompt: 3 are lost.
    assert report["laid_down"]["next call"] == 2
    assert tokens_lost(report) == {CAUSE["history"]: 3}
    assert report["lost"][0]["example"] == {"trajectory_id": "r/turn-2", "other": "r/turn-1", "position": 3}


def test_rollouts_that_part_where_they_were_sampled_or_answered_have_lost_nothing() -> None:
    report = report_of(
        make("a", [1, 2, 3, 4, 5, 6], spans=[(2, 3, 1.0), (5, 6, 1.0)]),
        make("b", [1, 2, 8, 4, 5, 6], spans=[(2, 3, 1.0), (5, 6, 1.0)]),
        make("c", [1, 2, 3, 9, 5, 6], spans=[(2, 3, 1.0), (5, 6, 1.0)]),
    )
    # b samples 8 instead of 3 and adds 4 tokens; c gets 9 instead of 4 after the same action and adds 3.
    assert report["laid_down"]["sampling"] == 4
    assert report["laid_down"]["environment"] == 3
    assert report["lost"] == []


def test_a_prompt_that_continues_after_the_end_of_another_has_lost_nothing() -> None:
    report = report_of(
        make("a", [1, 2, 3, 4], spans=[(2, 4, 1.0)]), make("b", [1, 2, 7, 7, 5], spans=[(4, 5, 1.0)], group="g")
    )
    # The prompt of a is 1 2, all of which b shares; its prompt continues with 7 7.
    assert report["laid_down"]["longer prompt"] == 3
    assert report["lost"] == []


def test_trajectories_of_different_groups_are_not_compared() -> None:
    report = report_of(make("a", [1, 2, 3], spans=[(2, 3, 1.0)]), make("b", [1, 5, 3], spans=[(2, 3, 1.0)], group="h"))
    assert report["lost"] == []
    assert report["num_alone"] == 2


GPT_OSS = "<|start|>assistant<|channel|>"
TODAY, HELPER = "\u4eca\u5929\u662f", "\u6709\u7528\u7684\u52a9\u624b"


@pytest.mark.parametrize(
    ("expected", "actual", "is_call", "cause"),
    [
        ("You help. Do it.", "You help. Do it.", False, "retokenisation"),
        ("You help. Do it.", "You help.\n\nDo it. ", False, "whitespace"),
        ("id call_8f2a91 ok, at 12:00:01.5", "id call_55d0c7 ok, at 09:15:59.0", False, "random ids"),
        ("Today is 2026-03-01.", "Today is 2026-04-12.", False, "random ids"),
        ("Today Date: 26 Jul 2024", "Today Date: 3 August 2025", False, "random ids"),
        ("run 3b241101-e2bb-4255-8caf-4136c566a962", "run 9b241101-e2bb-4255-8caf-4136c566a962", False, "random ids"),
        ("user\nHi<think>\nHm.\n</think>\n\nYes.", "user\nHiYes.", False, "template"),
        ("Hi<think>\nHm.\n</think>\n\nYes.", "HiYes.\nuser more", True, "template"),
        ("Today is Monday, March 3, 2025.", "Today is Tuesday, March 4, 2025.", False, "random ids"),
        (f"{TODAY}2025\u5e743\u67081\u65e5", f"{TODAY}2025\u5e743\u67082\u65e5", False, "random ids"),
        ("id 3F2504E0-4F89-11D3-9A0C-0305E82C3301", "id 9F2504E0-4F89-11D3-9A0C-0305E82C3301", False, "random ids"),
        ("id call_aBcDeFgHiJ", "id call_zYxWvUtSrQ", False, "random ids"),
        # run_tests looks like an id of a run, but it has no digit and no capital.
        ("Call run_tests and stop behind it.", "Call run_quickly and stop behind it.", False, "prompt edit"),
        (f"\u4e00\u4e2a{HELPER}", f"\u4e00\u4f4d{HELPER}", False, "prompt edit"),
        # The templates of gpt-oss, DeepSeek and Mistral drop reasoning from earlier turns, each with its own tags.
        (f"{GPT_OSS}analysis<|message|>Hm.<|end|>{GPT_OSS}final<|message|>Yes.<|return|>",
         f"{GPT_OSS}final<|message|>Yes.<|end|><|start|>user", True, "template"),
        ("Assistant<think>Hm.</think>Yes.", "Assistant</think>Yes. User", True, "template"),
        ("[/INST][THINK]Hm.[/THINK]Yes.</s>", "[/INST]Yes.</s>[INST]", True, "template"),
        ("You helps people with their trains.", "You help people with their trains.", False, "prompt edit"),
        ("I am cross about my late train to Kiel.", "Hello there, I want two seats please.", False, "other prompt"),
        ("tool: a b c d e f g", "tool: (3 lines left out)", True, "rewritten history"),
        # More text is an edit of a prompt, but a call may continue: then only the ids of the common text differ.
        ("You help. Do it.", "You help. Do it. And more.", False, "prompt edit"),
        ("You help. Do it.", "You help. Do it. And more.", True, "retokenisation"),
    ],
)  # fmt: skip
def test_a_cause_is_named_if_it_is_the_only_difference(expected: str, actual: str, is_call: bool, cause: str) -> None:
    assert classify_difference(expected, actual, is_call=is_call, whole=(True, True)).cause == cause


def test_a_difference_shows_the_words_on_both_sides() -> None:
    difference = classify_difference(
        "code that is not idented well", "code that is not indented well", is_call=False, whole=(True,) * 2
    )
    assert (difference.before, difference.expected, difference.actual) == (
        "code that is not ",
        "idented well",
        "indented well",
    )


def test_characters_before_a_cut_are_ignored() -> None:
    text = "word " * 40
    # "abc" and "ab" differ only in a character before the cut; of whole texts it is a difference besides the id.
    cut = classify_difference(f"call_1111111 {text}abc", f"call_2222222 {text}ab", is_call=False, whole=(False, False))
    assert cut.cause == "random ids"
    whole = classify_difference(f"call_1111111 {text}abc", f"call_2222222 {text}ab", is_call=False, whole=(True, True))
    assert whole.cause == "prompt edit"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("tokenizers")
    save(base / "stripping", STRIPPING)
    save(base / "plain", PLAIN)
    return base


def chat(name: str, *, system: str = "You help.", reply: str = "Yes.", reasoning: str = "Hm.") -> Trajectory:
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "May I?"},
        {"role": "assistant", "content": "First.", "reasoning_content": reasoning},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": reply},
    ]
    return Trajectory(name, f"{name}:1", Chat(messages, [0.0, 0.0, 1.0, 0.0, 1.0]), group_id="g")


def causes_of(folder: Path, *chats: Trajectory, template: str = "plain", expand: str = "trajectory") -> dict[str, int]:
    tokenizer = load_tokenizer(str(folder / template))
    done = [item for item in tokenize(chats, tokenizer=tokenizer, expand=expand) if isinstance(item, Trajectory)]
    return tokens_lost(explain_sharing(build_trie(done), tokenizer.batch_decode))


def test_the_text_of_a_prompt_gives_the_cause(folder: Path) -> None:
    assert causes_of(folder, chat("a"), chat("b", reply="No.")) == {}
    assert list(causes_of(folder, chat("a"), chat("b", system="You  help."))) == ["whitespace"]
    assert list(causes_of(folder, chat("a", system="Id call_12ab34."), chat("b", system="Id call_77cd12."))) == [
        "random ids"
    ]
    assert list(causes_of(folder, chat("a"), chat("b", system="You helps."))) == ["prompt edit"]


def test_a_template_that_drops_reasoning_costs_the_tokens_that_the_next_turn_adds_again(folder: Path) -> None:
    assert causes_of(folder, chat("a"), expand="turns") == {}
    causes = causes_of(folder, chat("a"), template="stripping", expand="turns")
    assert list(causes) == ["template"]
    assert causes["template"] > len("First.")
    assert list(causes_of(folder, chat("a"), template="stripping")) == ["template"]


def test_other_ids_of_the_same_text_are_retokenisation(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder / "plain"))
    whole = tokenizer("The quick brown fox")["input_ids"]
    apart = [each for word in ("Th", "e quick br", "own fox") for each in tokenizer(word)["input_ids"]]
    assert whole != apart
    rollouts = [
        make(name, [*ids, 5], spans=[(len(ids), len(ids) + 1, 1.0)]) for name, ids in (("a", whole), ("b", apart))
    ]
    report = explain_sharing(build_trie(rollouts), tokenizer.batch_decode)
    assert list(tokens_lost(report)) == ["retokenisation"]
    # All tokens from the first different id on are lost; argmin finds the first False.
    assert report["laid_down"]["lost"] == len(apart) - np.argmin(np.array(whole[:6]) == np.array(apart[:6]))


def test_partings_beyond_the_most_are_counted_as_not_read(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder / "plain"))
    chats = [chat("a"), chat("b", system="You helps you now."), chat("c", system="They help.")]
    done = [item for item in tokenize(chats, tokenizer=tokenizer) if isinstance(item, Trajectory)]
    report = explain_sharing(build_trie(done), tokenizer.batch_decode, most=1)
    assert sorted(cause["num_partings"] for cause in report["lost"]) == [1, 1]
    assert "not read" in tokens_lost(report)


def test_stats_prints_the_causes_and_escapes_the_text_of_rollouts(folder: Path, tmp_path: Path, treepack: Run) -> None:
    import json

    path = tmp_path / "r.jsonl"
    systems = ("You help.", "You \x1b[31mhelps.")
    records = [
        {"id": str(i), "group_id": "g", "messages": [
            {"role": "system", "content": system}, {"role": "user", "content": "May I?"},
            {"role": "assistant", "content": "Yes."}]}
        for i, system in enumerate(systems)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, records)))
    done = treepack("stats", str(path), "--tokenizer", str(folder / "plain"), "--verbose")
    assert done.status == 0
    assert "prompt edit" in done.out
    assert '"\\u001b[31mhelps.' in done.out
    assert "\x1b" not in done.out
    report = treepack("stats", str(path), "--tokenizer", str(folder / "plain"), "--json").json
    assert sum(report["sharing"]["laid_down"].values()) == report["tokens_tree"]  # type: ignore[index]


def test_the_page_on_sharing_quotes_the_output_of_the_command(treepack: Run) -> None:
    root = ROOT
    block = (root / "docs" / "templates.md").read_text().split("```")[1]
    command, *shown = [line for line in block.splitlines()[1:] if line != "..."]
    inputs = [str(root / word) if word.startswith("sample_data") else word for word in command.split()[2:]]
    printed = treepack(*inputs).out.splitlines()
    assert len(shown) > 10
    assert [line for line in shown if line not in printed] == []

"""The programs and commands of the page about environments run as they are."""

from __future__ import annotations

import asyncio
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treepack as treepack_package
from support.command_line import Run
from support.paths import ROOT
from treepack.rollout.engine import STOP, Segment
from treepack.rollout.environment import METHODS, OPTIONAL_METHODS, start_episode
from treepack.rollout.options import Sampling, TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.rewards import single_turn
from treepack.rollout.sampler import sample_tree
from treepack.rollout.tree import Tree
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trajectory import Int32

PAGE = (ROOT / "docs" / "environments.md").read_text()
DIGITS = tuple(range(18, 28))  # 0 to 9 in the sample tokenizer


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def names_of(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(program, "docs/environments.md", "exec"), names)
    return names


class Guesser:
    """An engine whose turns are one random digit."""

    sampling = Sampling(stop_token_ids=DIGITS)

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        digits = np.random.default_rng(seed).choice(DIGITS, (count, 1)).astype(np.int32)
        return [Segment(tokens, np.full(1, np.log(0.1), np.float32), STOP) for tokens in digits]

    async def publish(self, version: str) -> None:
        """Nothing depends on the version."""

    async def close(self) -> None:
        """Nothing is open."""


def test_the_environment_of_the_page_plays_its_game() -> None:
    factory = names_of(blocks("python")[1])["Guessing"]
    tokenizer = load_tokenizer(str(ROOT / "sample_data" / "tokenizer"))
    options = TreeOptions(width=12, max_tokens=400, segment=None, first_forks=6)

    async def play() -> Tree:
        query = Query("three", "three", np.zeros(0, np.int32), fields={"number": 3})
        prompt, episode = await start_episode(factory, query, tokenizer)
        return await sample_tree(replace(query, prompt=prompt), Guesser(), options, episode=episode)

    rewards = set()
    for leaf in asyncio.run(play()).leaves:
        text = tokenizer.decode(leaf.ids())
        guesses = re.findall(r"assistant\n(\d)", text)
        answers = ["higher" if int(guess) < 3 else "lower" for guess in guesses if guess != "3"]
        # The last of four wrong guesses has no answer.
        assert re.findall("higher|lower", text) == answers[: len(guesses) - 1]
        assert "3" not in guesses[:-1]
        assert leaf.reward == float(guesses[-1] == "3")
        assert text.count("<|im_end|>") == 2 * len(guesses) - 1
        rewards.add(leaf.reward)
    assert rewards == {0.0, 1.0}


def test_the_reward_of_the_page_reads_text_and_fields() -> None:
    function = names_of(blocks("python")[0])["is_right"]
    tokenizer = load_tokenizer(str(ROOT / "sample_data" / "tokenizer"))
    query = Query("q", "q", np.array([1], np.int32), fields={"solution": 42})
    episode = single_turn(function, query, tokenizer)
    rewards = [asyncio.run(episode.reward(np.array(tokenizer.encode(text)))) for text in ("It is 42<|im_end|>", "41")]
    assert rewards == [1.0, 0.0]


def test_the_page_lists_all_methods() -> None:
    listed = {
        name for row in re.findall(r"^\| (`\w+\(.*?) \|", PAGE, re.MULTILINE) for name in re.findall(r"(\w+)\(", row)
    }
    assert listed == {*METHODS, *OPTIONAL_METHODS}


def test_the_lines_of_the_page_sample_rollouts_in_an_environment(tmp_path: Path) -> None:
    names = names_of(blocks("python")[1]) | {
        "treepack": treepack_package,
        "start_episode": start_episode,
        "tokenizer": load_tokenizer(str(ROOT / "sample_data" / "tokenizer")),
        "queries": [Query(f"{i}", f"{i}", np.zeros(0, np.int32), fields={"number": i}) for i in range(3)],
        "engine": Guesser(),
        "options": TreeOptions(width=4, max_tokens=400, segment=None),
    }
    lines = blocks("python")[2].replace('"games.jsonl"', repr(str(tmp_path / "games.jsonl")))
    body = "".join(f"    {line}\n" for line in lines.splitlines())
    exec(f"async def page():\n{body}    return summary", names)
    assert asyncio.run(names["page"]()).num_rollouts == 12


@pytest.mark.slow
def test_the_commands_of_the_page_about_environments_run(
    treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    (tmp_path / "guessing.py").write_text(blocks("python")[1])
    (tmp_path / "numbers.jsonl").write_text(blocks("json")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (commands,) = blocks("sh")
    for line in commands.replace("\\\n", "").splitlines():
        done = treepack(*shlex.split(line)[1:])
        assert done.status == 0, f"{line}: {done.err}"
    assert len((tmp_path / "games.jsonl").read_text().splitlines()) == 8

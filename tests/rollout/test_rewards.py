"""Reward functions of single responses, and functions by name."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.paths import ROOT
from support.refusal import refusal
from treepack.errors import TreepackError
from treepack.rollout.query import Query
from treepack.rollout.rewards import as_reward, single_turn
from treepack.rollout.user_code import load_callable
from treepack.tokenise.tokenization import read_tokenizer

QUERY = Query("q3", "q3", np.array([1], np.int32), fields={"answer": 4}, source="p.jsonl:3")
NO_IDS = np.zeros(0, np.int32)


def score(function: Any, ids: list[int], tokenizer: Any = None) -> float | None:
    async def run() -> float | None:
        episode, observation = await single_turn(function, QUERY, tokenizer).after(np.array(ids, np.int32))
        assert observation is None
        return await episode.reward(NO_IDS)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("value", "reward"), [(0.5, 0.5), (True, 1.0), (np.float32(2), 2.0), (np.bool_(False), 0.0), (None, None)]
)
def test_a_reward_is_a_number_a_bool_or_none(value: Any, reward: float | None) -> None:
    async def later(text: Any, fields: Any, *, ids: Any) -> Any:
        return value

    assert score(lambda text, fields, ids: value, [7]) == reward
    assert score(later, [7]) == reward


def test_a_reward_function_gets_the_text_the_fields_and_the_ids() -> None:
    seen: list[Any] = []
    tokenizer = read_tokenizer(str(ROOT / "sample_data" / "tokenizer"))
    ids = [*tokenizer.backend_tokenizer.encode("4", add_special_tokens=False).ids, tokenizer.eos_token_id]
    score(lambda text, fields, *, ids: seen.append((text, fields, ids)), ids, tokenizer)
    score(lambda text, fields, *, ids: seen.append((text, fields, ids)), ids)
    assert seen == [("4", {"answer": 4}, ids), (None, {"answer": 4}, ids)]


def _exhausted(text: Any, fields: Any, *, ids: Any) -> float:
    return next(iter(()))


def _broken(text: Any, fields: Any, *, ids: Any) -> float:
    return 1 / 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_broken, "_broken raised ZeroDivisionError: division by zero"),
        (_exhausted, "_exhausted raised StopIteration"),
        (lambda *_, ids: float("inf"), "<lambda> returned the reward inf; expected a finite number or None"),
        (lambda *_, ids: "yes", "<lambda> returned a reward of type str; expected a number or None"),
        (lambda text: 1.0, "<lambda> raised TypeError: "),
    ],
)
def test_a_failing_reward_names_the_query_and_the_function(function: Any, message: str) -> None:
    with pytest.raises(TreepackError, match=rf"^p\.jsonl:3: query q3: \S*test_rewards:\S*{message}"):
        score(function, [7])


def trl_of_all(prompts: Any, completions: Any, answer: Any, **more: Any) -> list[float]:
    assert (prompts, answer, more) == ([None], [4], {"completion_ids": [[7, 8]]})
    return [0.5 if completions == [None] else 0.0]


def trl_of_few(completions: Any, answer: Any) -> list[bool]:
    return [answer == [4]]


async def trl_later(completions: Any, **_: Any) -> np.ndarray:
    return np.array([0.25])


@pytest.mark.parametrize(("function", "reward"), [(trl_of_all, 0.5), (trl_of_few, 1.0), (trl_later, 0.25)])
def test_a_reward_in_the_shape_of_trl_gets_lists_of_one(function: Any, reward: float) -> None:
    assert score(as_reward(function), [7, 8]) == reward


def test_a_reward_of_trl_gets_messages_if_the_prompt_has_some() -> None:
    seen: list[Any] = []

    def function(completions: Any, prompts: Any) -> list[float]:
        seen.extend([completions, prompts])
        return [1.0]

    messages = [{"role": "user", "content": "2 + 2?"}]
    asyncio.run(as_reward(function)("4", {"messages": messages}, ids=[23]))  # type: ignore[arg-type]
    assert seen == [[[{"role": "assistant", "content": "4"}]], [messages]]


def test_a_reward_of_trl_must_return_one_number_in_a_list() -> None:
    assert refusal(score, as_reward(lambda completions: 1.0), [7]).endswith(
        "returned 1.0; expected a list with one reward"
    )
    with pytest.raises(TreepackError, match=r"lambda.* raised ZeroDivisionError"):
        score(as_reward(lambda completions: 1 / 0), [7])


@pytest.mark.parametrize("function", [lambda text: 1.0, lambda text, fields: 1.0, lambda a, b, c, ids: 1.0])
def test_another_signature_is_refused_at_once(function: Any) -> None:
    with pytest.raises(TreepackError, match=r"takes \(.*\); write score\(text, fields, \*, ids\), or TRL's score"):
        as_reward(function)


@pytest.mark.parametrize(
    "function", [lambda text, fields, ids: 1.0, lambda *a, **k: 1.0, _broken, lambda text, fields, *, ids, x=1: 1.0]
)
def test_a_reward_of_the_usual_shape_stays(function: Any) -> None:
    assert as_reward(function) is function


def test_plain_rewards_run_side_by_side() -> None:
    both = threading.Barrier(2, timeout=20)

    def slow(text: Any, fields: Any, *, ids: Any) -> float:
        both.wait()  # raises unless a second call runs at the same time
        return 1.0

    async def run() -> set[float | None]:
        episode = single_turn(slow, QUERY)
        return set(await asyncio.gather(episode.reward(np.array([1])), episode.reward(np.array([2]))))

    assert asyncio.run(run()) == {1.0}


def test_a_function_is_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("class Maths:\n    @staticmethod\n    def score(): return 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    assert load_callable("my_rewards:Maths.score")() == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rewards", "'rewards' is not of the form module:name; write for example rewards:score"),
        ("no_such_rewards:score", "no_such_rewards:score: there is no module no_such_rewards; run treepack in the"),
        ("raising_rewards:score", r"raising_rewards:score: importing raising_rewards raised ZeroDivisionError"),
        ("lacking_rewards:score", r"there is no module no_such_package|raised ModuleNotFoundError: No module named"),
        ("good_rewards:scor", "good_rewards:scor: good_rewards has no scor; it contains score$"),
        ("good_rewards:number", "good_rewards:number: number has the type int; expected a function or a class"),
    ],
)
def test_a_name_that_cannot_be_loaded_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / "raising_rewards.py").write_text("1 / 0\n")
    (tmp_path / "lacking_rewards.py").write_text("import no_such_package\n")
    (tmp_path / "good_rewards.py").write_text("number = 1\ndef score(): return 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    with pytest.raises(TreepackError, match=message):
        load_callable(name)

"""Prompts and rewards of a taskset of verifiers, in trees of a simulated engine."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verifiers")  # of .venv-verifiers

from support import sums_taskset as sums
from support.paths import ROOT
from treepack.errors import TreepackError
from treepack.rollout.engine import Segment
from treepack.rollout.environment import start_episode
from treepack.rollout.options import Sampling, independent
from treepack.rollout.prompts import PromptReader
from treepack.rollout.queries import QuerySources, read_queries
from treepack.rollout.query import Query
from treepack.rollout.sampler import sample_tree
from treepack.rollout.verifiers import task_environment, task_queries, task_records
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trajectory import Int32

pytestmark = pytest.mark.verifiers

NO_IDS = np.zeros(0, np.int32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(ROOT / "sample_data" / "tokenizer"))


class Calculator:
    """An engine that answers 4, the second time with many spaces before it, and then 5."""

    def __init__(self, tokenizer: Any) -> None:
        self._answers = [tokenizer.encode(text) for text in ("4", "    \n    \n    \n4", "5")]
        self.sampling = Sampling(stop_token_ids=(tokenizer.eos_token_id,))

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        stop = list(self.sampling.stop_token_ids)
        return [Segment(np.array(self._answers[i % 3] + stop, np.int32), None, "stop") for i in range(count)]

    async def publish(self, version: str) -> None:
        """Nothing depends on the version."""

    async def close(self) -> None:
        """Nothing is open."""


def test_trees_have_the_prompts_and_the_weighted_rewards_of_the_tasks(tokenizer: Any) -> None:
    taskset = sums.taskset()
    queries = task_queries(taskset, tokenizer)
    factory = task_environment(taskset)

    async def rewards(query: Query) -> list[float | None]:
        prompt, episode = await start_episode(factory, query, tokenizer)
        assert prompt.tolist() == query.prompt.tolist()
        options = independent(width=3, max_tokens=40)
        tree = await sample_tree(query, Calculator(tokenizer), options, episode=episode)
        return [leaf.reward for leaf in tree.leaves]

    # 2 + 2 = 4: right and short, right, and short alone.
    assert asyncio.run(rewards(queries[2])) == [1.5, 1.0, 0.5]
    assert asyncio.run(rewards(queries[4])) == [0.5, 0.0, 0.5]
    assert len({query.group_id for query in queries}) == 5


def test_prompts_are_those_of_the_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "4 + 4 = ?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert task_queries(sums.taskset(), tokenizer)[4].prompt.tolist() == ids


def test_records_of_tasks_are_prompts_of_the_command(tokenizer: Any, tmp_path: Path) -> None:
    taskset = sums.taskset().shuffle(seed=1).take(3)
    lines = [json.dumps(record) + "\n" for record in task_records(taskset)]
    (tmp_path / "tasks.jsonl").write_text("".join(lines))
    sources = QuerySources(reader=PromptReader(tokenizer), has_environment=True)
    queries = read_queries(tmp_path / "tasks.jsonl", sources).queries

    async def prompts() -> list[list[int]]:
        started = [await start_episode(task_environment(taskset), query, tokenizer) for query in queries]
        return [ids.tolist() for ids, _ in started]

    assert asyncio.run(prompts()) == [query.prompt.tolist() for query in task_queries(taskset, tokenizer)]


def score(factory: Any, tokenizer: Any, fields: dict[str, Any], text: str = "0") -> float | None:
    async def run() -> float | None:
        query = Query("q", "q", NO_IDS, fields=fields, source="tasks.jsonl:1")
        _, episode = await start_episode(factory, query, tokenizer)
        return await episode.reward(np.array(tokenizer.encode(text), np.int32))

    return asyncio.run(run())


def test_a_response_that_was_cut_off_is_truncated_for_its_rewards(tokenizer: Any) -> None:
    assert score(task_environment(sums.taskset()), tokenizer, {"idx": 0}) == 1.0


def test_a_renderer_separates_reasoning_from_the_content(tokenizer: Any) -> None:
    from renderers import DefaultRendererConfig, create_renderer

    renderer = create_renderer(tokenizer, DefaultRendererConfig(reasoning_parser="think"))
    text = "<think>nothing</think>0"
    assert score(task_environment(sums.taskset()), tokenizer, {"idx": 0}, text) == 0.0
    assert score(task_environment(sums.taskset(), renderer=renderer), tokenizer, {"idx": 0}, text) == 1.0


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        (sums.Sum, {}, "the record has no idx, the position of its task; write records with task_records"),
        (sums.Sum, {"idx": 5}, "Sums has no task with idx 5"),
        (sums.InContainer, {"idx": 0}, "support.sums_taskset:InContainer needs a container; sample it with verifiers"),
        (sums.WithRuntime, {"idx": 0}, "WithRuntime has passes, which needs a runtime; sample it with verifiers"),
        (sums.WithSetup, {"idx": 0}, "WithSetup has setup, which needs a runtime; sample it with verifiers itself"),
        (sums.WithTools, {"idx": 0}, "WithTools has tools, which verifiers runs as servers; sample it with verifiers"),
        (sums.Opened, {"idx": 0}, "Opened has no prompt, because a user opens the conversation; sample it"),
        (sums.Raising, {"idx": 0}, "TaskEnvironment.reward raised TaskError: .*no such sum"),
    ],
)
def test_an_unusable_task_is_refused_in_one_sentence(tokenizer: Any, task: Any, fields: Any, message: str) -> None:
    with pytest.raises(TreepackError, match=rf"^tasks\.jsonl:1: query q: .*{message}"):
        score(task_environment(sums.taskset(task)), tokenizer, fields)


def test_an_infinite_taskset_is_refused(tokenizer: Any) -> None:
    taskset = sums.taskset()
    taskset.INFINITE = True
    with pytest.raises(TreepackError, match=r"Sums never ends; give it as taskset.take\(1000\)"):
        task_queries(taskset, tokenizer)
    assert len(task_queries(taskset.take(2), tokenizer)) == 2


def test_the_module_of_the_page_writes_records_and_scores_them(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "environments.md").read_text().partition("## Tasks of verifiers")[2]
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "sums.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path("sums.py", run_name="__main__")
    records = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert [record["idx"] for record in records] == list(range(100))
    assert score(names["environment"], tokenizer, records[7], "14") == 1.0
    assert score(names["environment"], tokenizer, records[8], "14") == 0.0

"""Tasks of verifiers as prompts, and their rewards as environments of one turn.

    taskset --task_queries--> [Query, ...]              prompts rendered by treepack, one for each task
    taskset --task_environment--> factory               prompt of the task, and the sum of its weighted rewards

For `treepack rollout --environment`, put the taskset and `environment = task_environment(taskset)` in a module of your
own; a record of PROMPTS is {"group_id": "...", "idx": 3}, as `task_records` makes them.

Rewards that need a runtime, and tool servers, belong to verifiers' own harness and sandboxes. Such tasks are refused;
sample them with verifiers, whose traces `treepack build-trie` reads.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

from treepack.errors import TreepackError, install_hint
from treepack.files.input_files.records import Record
from treepack.rollout.prompts import PromptReader
from treepack.rollout.query import Query
from treepack.trajectory import Int32

_REMEDY = "sample it with verifiers itself, and give its traces to treepack build-trie"


def task_records(taskset: Any) -> Iterator[dict[str, Any]]:
    """Yield {"group_id": key of the task, "idx": position} for each task; write them as JSON lines for PROMPTS.

    Raises:
        TreepackError: a task cannot be sampled without verifiers' harness.
    """
    for task in taskset:
        _check_task(task, taskset)
        yield {"group_id": task.key, "idx": task.data.idx}


def task_queries(taskset: Any, tokenizer: Any) -> list[Query]:
    """Return a query for each task of a taskset that ends.

    `tokenizer` is a fast tokenizer of transformers with a chat template. The prompts come from the environments of
    `task_environment`.

    Raises:
        TreepackError: the taskset has no end, or a task cannot be sampled without verifiers' harness.
    """
    if not taskset.bounded:
        raise TreepackError(f"{type(taskset).__name__} never ends; give it as taskset.take(1000)")
    tasks = _TaskPrompts(taskset)
    return [
        Query(record["group_id"], record["group_id"], tasks.prompt(record["idx"], tokenizer), fields=record)
        for record in task_records(taskset)
    ]


def task_environment(taskset: Any, *, renderer: Any = None) -> Callable[[dict[str, Any], Any], TaskEnvironment]:
    """Return the factory of a taskset's environments, which takes records with `idx`, and a tokenizer.

    `renderer` is one of the package `renderers`, which verifiers installs. Its `parse_response` divides a response into
    content and reasoning; without it the content is the whole text, decoded without special tokens.

    The factory raises TreepackError without a tokenizer, if `idx` is unknown, and if the task needs verifiers'
    harness.
    """
    tasks = _TaskPrompts(taskset)

    def environment(fields: dict[str, Any], tokenizer: Any) -> TaskEnvironment:
        if tokenizer is None:
            raise TreepackError("the tasks of verifiers are text; give --tokenizer NAME")
        index = fields.get("idx")
        if not isinstance(index, int):
            raise TreepackError("the record has no idx, the position of its task; write records with task_records")
        return TaskEnvironment(tasks.task(index), tasks.prompt(index, tokenizer), tokenizer, renderer)

    return environment


class TaskEnvironment:
    """One task: its prompt, and the reward of one response."""

    def __init__(self, task: Any, prompt: Int32, tokenizer: Any, renderer: Any) -> None:
        self._task = task
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._response: list[int] = []
        self._finish = "stop"

    def prompt(self) -> list[int]:
        """Return the messages of the task, rendered."""
        ids: list[int] = self._prompt.tolist()
        return ids

    def observe(self, response_ids: list[int]) -> None:
        """Take the response, which ends the episode."""
        self._response = response_ids

    def truncate(self, response_ids: list[int]) -> None:
        """Take a response that was cut off; the task's rewards see the finish reason "length"."""
        self._response, self._finish = response_ids, "length"

    async def reward(self) -> float | None:
        """Return the sum of the task's weighted rewards, None if it has none."""
        trace = self._trace()
        await self._task.score(trace)
        return float(trace.reward) if trace.rewards else None

    def _trace(self) -> Any:
        vf = _verifiers()
        from verifiers.v1.state import state_cls
        from verifiers.v1.types import Usage

        task, prompt = self._task, self._prompt.tolist()
        messages = _messages(task)
        nodes = [
            # The ids of the prompt are the ids of its messages together; the last one carries them.
            vf.MessageNode(
                parent=i - 1 if i else None,
                message=message,
                token_ids=prompt if i == len(messages) - 1 else [],
                mask=[False] * len(prompt) if i == len(messages) - 1 else [],
            )
            for i, message in enumerate(messages)
        ]
        nodes.append(
            vf.MessageNode(
                parent=len(nodes) - 1,
                message=self._assistant_message(),
                sampled=True,
                token_ids=self._response,
                mask=[True] * len(self._response),
            )
        )
        usage = Usage(prompt_tokens=len(prompt), completion_tokens=len(self._response))
        return vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=nodes,
            calls=[vf.ModelCall(node=len(nodes) - 1, finish_reason=self._finish, usage=usage)],
            is_completed=True,
            ok=True,
        )

    def _assistant_message(self) -> dict[str, Any]:
        if self._renderer is None:
            text = self._tokenizer.decode(self._response, skip_special_tokens=True)
            return {"role": "assistant", "content": text}
        parsed = self._renderer.parse_response(self._response)
        return {"role": "assistant", "content": parsed.content, "reasoning_content": parsed.reasoning_content}


class _TaskPrompts:
    """The tasks of a taskset by their position, and their prompts; threads may ask at the same time."""

    def __init__(self, taskset: Any) -> None:
        self._taskset = taskset
        self._iterator: Iterator[Any] = iter(taskset)
        self._tasks: dict[int, Any] = {}
        self._prompts: dict[int, Int32] = {}
        self._lock = threading.Lock()

    def task(self, index: int) -> Any:
        """Return the task with this position in the taskset's `load`; a view may be without it."""
        with self._lock:
            while index not in self._tasks:
                task = next(self._iterator, None)
                if task is None:
                    raise TreepackError(f"{type(self._taskset).__name__} has no task with idx {index}")
                self._tasks[task.data.idx] = task
            task = self._tasks[index]
        _check_task(task, self._taskset)
        return task

    def prompt(self, index: int, tokenizer: Any) -> Int32:
        """Return the token ids of the messages of a task, int32 [n], with the generation prompt."""
        task = self.task(index)
        with self._lock:
            if index not in self._prompts:
                where = f"{type(self._taskset).__name__}, task {index}"
                prompt = PromptReader(tokenizer).read(Record(where, "", {"messages": _messages(task)}))
                assert prompt is not None
                self._prompts[index] = prompt.ids
            return self._prompts[index]


def _messages(task: Any) -> list[dict[str, Any]]:
    data = task.data
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message.model_dump(exclude_none=True) for message in data.prompt)]


def _check_task(task: Any, taskset: Any) -> None:
    """Refuse a task that needs more than a response.

    Raises:
        TreepackError: naming the part of the task that needs verifiers' harness.
    """
    vf = _verifiers()
    kind = type(task)
    scores = [*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges())]
    with_runtime = [score.__name__ for score in scores if _needs_runtime(score)]
    hooks = [name for name in ("setup", "finalize") if getattr(kind, name) is not getattr(vf.Task, name)]
    problem = None
    if task.data.prompt is None:
        problem = "has no prompt, because a user opens the conversation"
    elif kind.NEEDS_CONTAINER:
        problem = "needs a container"
    elif with_runtime:
        problem = f"has {with_runtime[0]}, which needs a runtime"
    elif hooks:
        problem = f"has {hooks[0]}, which needs a runtime"
    elif kind.toolsets(task.config) or type(taskset).toolsets(taskset.config):
        problem = "has tools, which verifiers runs as servers"
    if problem is not None:
        raise TreepackError(f"{kind.__module__}:{kind.__qualname__} {problem}; {_REMEDY}")


def _needs_runtime(score: Any) -> bool:
    parameter = inspect.signature(score).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _verifiers() -> Any:
    try:
        import verifiers.v1
    except ImportError as error:
        raise TreepackError(f"verifiers is not installed; {install_hint('verifiers')}") from error
    return verifiers.v1

"""A taskset of verifiers: sums, with two weighted rewards; and tasks that need verifiers' own harness."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class SumData(vf.TaskData):  # type: ignore[misc]
    """A sum and its value."""

    answer: int


class Sum(vf.Task[SumData]):  # type: ignore[misc]
    """One sum: 1 for the right number, and half a point for a short response that was not cut off."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def is_right(self, trace: Any) -> float:
        """Compare the response with the sum."""
        return float(trace.last_reply.strip() == str(self.data.answer))

    @vf.reward(weight=0.5)  # type: ignore[untyped-decorator]
    async def is_short(self, task: Any, trace: Any) -> float:
        """Count the tokens of the response."""
        assert task.answer == self.data.answer
        return float(trace.num_output_tokens < 4 and not trace.is_truncated)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):  # type: ignore[misc]
    """0 + 0 to 4 + 4; the last one as messages."""

    task = Sum

    def load(self) -> Iterator[Any]:
        """Yield the tasks."""
        for i in range(5):
            text = f"{i} + {i} = ?"
            prompt = text if i < 4 else [{"role": "user", "content": text}]
            yield self.task(SumData(prompt=prompt, answer=2 * i, system_prompt="Add."))


class Raising(Sum):
    """A task whose reward raises."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def is_right(self, trace: Any) -> float:
        """Fail."""
        raise ValueError("no such sum")


class InContainer(Sum):
    """A task for a container."""

    NEEDS_CONTAINER = True


class WithRuntime(Sum):
    """A task whose reward runs programs."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def passes(self, trace: Any, runtime: Any) -> float:
        """Would run a program."""
        raise AssertionError


class WithSetup(Sum):
    """A task that prepares a runtime."""

    async def setup(self, trace: Any, runtime: Any) -> None:
        """Would write files."""
        raise AssertionError


class WithTools(Sum):
    """A task with a tool server."""

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        """Return one server."""
        return [vf.Toolset(vf.ToolsetConfig())]


class Opened(Sum):
    """A task that a user opens."""

    def __init__(self, data: Any, config: Any = None) -> None:
        super().__init__(data.model_copy(update={"prompt": None}), config)


def taskset(task: type[Sum] = Sum) -> Sums:
    """Return the sums as tasks of this class."""
    sums = Sums(vf.TasksetConfig())
    sums.task = task
    return sums

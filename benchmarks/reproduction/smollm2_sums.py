"""The task of the SmolLM2 demonstration: sums of several numbers, written step by step in a chat.

    draw(rng, 3)   user       What is 482 + 77 + 915? Add one number per line.
                   assistant  482 + 77 = 559
                              559 + 915 = 1474
                              Answer: 1474

The reward is 1 if the last number of the response is the sum, and 0 otherwise. The number of addends is the difficulty.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

ADDENDS = (2, 3, 4)
LARGEST = 999
# 4 addends need about 55 tokens.
MAX_TOKENS = 80


@dataclass(frozen=True, slots=True)
class Sum:
    """A problem: the numbers to add."""

    numbers: tuple[int, ...]

    @property
    def name(self) -> str:
        """A name that no other problem has: "482+77+915"."""
        return "+".join(map(str, self.numbers))

    def question(self) -> str:
        """Return the message of the user."""
        return f"What is {' + '.join(map(str, self.numbers))}? Add one number per line."

    def solution(self) -> str:
        """Return the right message of the assistant."""
        total, lines = self.numbers[0], []
        for number in self.numbers[1:]:
            lines.append(f"{total} + {number} = {total + number}")
            total += number
        return "\n".join([*lines, f"Answer: {total}"])

    def reward(self, response: str) -> float:
        """Return 1.0 if the last number of `response` is the sum, else 0.0."""
        numbers = re.findall(r"\d+", response)
        # No int: a response may contain any number of digits.
        return float(bool(numbers) and numbers[-1] == str(sum(self.numbers)))

    def messages(self, *, solved: bool) -> list[dict[str, str]]:
        """Return the chat, with the assistant's message if it is `solved`."""
        question = {"role": "user", "content": self.question()}
        return [question, {"role": "assistant", "content": self.solution()}] if solved else [question]


def draw(rng: np.random.Generator, addends: int) -> Sum:
    """Return a random problem of `addends` numbers."""
    return Sum(tuple(rng.integers(1, LARGEST + 1, addends).tolist()))


def problems(seed: int, *, without: Collection[Sum] = frozenset()) -> Iterator[Sum]:
    """Yield distinct problems without end, of 2, 3, 4, 2, 3, ... addends, and none of `without`."""
    rng = np.random.default_rng(seed)
    known = set(without)
    for number in range(1 << 62):
        addends = ADDENDS[number % len(ADDENDS)]
        while (problem := draw(rng, addends)) in known:
            pass
        known.add(problem)
        yield problem


def chat_record(problem: Sum, *, solved: bool) -> dict[str, Any]:
    """Return a record of `treepack build-trie`: the chat, its id and its group."""
    return {"rollout_id": problem.name, "group_id": problem.name, "messages": problem.messages(solved=solved)}

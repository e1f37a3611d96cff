"""Task A: evaluate a chain of operations modulo a prime, one line for each, then the answer. One turn.

    prompt      <steps> 17 a: + 5 b: * 3 ?                       (17 + 5) * 3 modulo 97
    response    a: 17 + 5 = 22 b: 22 * 3 = 66 answer 66 <stop>

The level of a prompt is the number of its operations, 2 .. 12. Traces of the warm-up have a wrong result in each line
with a probability `error` and continue with it, so a policy that imitates them solves a prompt of level n with about
(1 - error)^n, 0.30 on average over all levels: easy and hopeless prompts in one pool, and outcomes that are decided in
the middle.
The reward is 1 if the response ends with the right answer and the stop token, else 0.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from words import ID, LABELS, STOP, encode

from treepack.rollout.episode import Episode, SingleTurn
from treepack.rollout.query import Query
from treepack.trajectory import Int32

LEVELS = range(2, len(LABELS) + 1)
MAX_TOKENS = 6 * len(LABELS) + 8  # 6 tokens of a line, 3 of the answer, and room for a few that do not belong
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True, slots=True)
class Dial:
    """Difficulty of all prompts of a run besides their level.

    `modulus` is at most 97 and `largest` the largest operand of an operation; both set how many facts there are to
    learn: 97 * 8 * 3 with the defaults. `error` is the probability of a wrong line in the traces of the warm-up.
    """

    modulus: int = 97
    largest: int = 9
    error: float = 0.18


@dataclass(frozen=True, slots=True)
class Problem:
    """A chain: the first number, and operations such as ("+", 5)."""

    first: int
    operations: tuple[tuple[str, int], ...]
    modulus: int

    def results(self) -> list[int]:
        """Return the number after each operation."""
        numbers = [self.first]
        for sign, operand in self.operations:
            numbers.append(OPERATIONS[sign](numbers[-1], operand) % self.modulus)
        return numbers[1:]

    def prompt(self) -> Int32:
        """Return the token ids of the prompt."""
        lines = [f"{label} {sign} {operand}" for label, (sign, operand) in zip(LABELS, self.operations, strict=False)]
        return encode(f"<steps> {self.first} {' '.join(lines)} ?")

    def trace(self, rng: np.random.Generator, error: float) -> Int32:
        """Return the token ids of a response in which each line is wrong with the probability `error`."""
        number, words = self.first, []
        for label, (sign, operand) in zip(LABELS, self.operations, strict=False):
            right = OPERATIONS[sign](number, operand) % self.modulus
            # Adding 1 .. modulus - 1 gives each of the other numbers with the same probability.
            result = (right + int(rng.integers(1, self.modulus))) % self.modulus if rng.random() < error else right
            words.append(f"{label} {number} {sign} {operand} = {result}")
            number = result
        return encode(f"{' '.join(words)} answer {number} <stop>")


def draw(rng: np.random.Generator, level: int, dial: Dial) -> Problem:
    """Return a random problem of `level` operations."""
    signs = rng.choice(list(OPERATIONS), level).tolist()
    operands = rng.integers(2, dial.largest + 1, level).tolist()
    return Problem(int(rng.integers(dial.modulus)), tuple(zip(signs, operands, strict=True)), dial.modulus)


def queries(num: int, *, seed: int, dial: Dial, levels: Sequence[int] = LEVELS) -> list[Query]:
    """Return `num` random prompts whose levels take turns. Fields: `answer`, and `level`."""
    rng = np.random.default_rng([seed, 1])
    made = []
    for number in range(num):
        level = levels[number % len(levels)]
        problem = draw(rng, level, dial)
        key = f"steps-{seed}-{number}"
        fields = {"answer": problem.results()[-1], "level": level}
        made.append(Query(key, key, problem.prompt(), fields=fields))
    return made


async def start(query: Query) -> tuple[Int32, Episode]:
    """Return the prompt of a query and its episode."""

    async def score(response: Int32) -> float:
        # A prefix of a rollout may end within the answer.
        return reward(np.concatenate([query.prompt, response]), int(query.fields["answer"]))

    return query.prompt, SingleTurn(score)


def reward(ids: Int32, answer: int) -> float:
    """Return 1.0 if a response, or a prompt with its response, ends with this answer, else 0.0."""
    return float(ids[-3:].tolist() == [ID["answer"], ID[str(answer)], STOP])


def examples(num: int, *, seed: int, dial: Dial, levels: Sequence[int] = LEVELS) -> list[tuple[Int32, Int32]]:
    """Return `num` samples for the warm-up: token ids, and 1 for each token to train, int32 [n] each."""
    rng = np.random.default_rng([seed, 2])
    made = []
    for number in range(num):
        problem = draw(rng, levels[number % len(levels)], dial)
        prompt, response = problem.prompt(), problem.trace(rng, dial.error)
        mask = np.repeat(np.array([0, 1], np.int32), [len(prompt), len(response)])
        made.append((np.concatenate([prompt, response]), mask))
    return made

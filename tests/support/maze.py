"""A small deterministic environment, a law of its moves, and the reward of a path by an independent replay of its ids.

prompt [11]    turn [2, 3, 0]: east, south, stop    observation [5 + x, 8 + y] of the place reached
"""

from __future__ import annotations

from typing import Any

import numpy as np

from support.markov_law import MarkovLaw
from treepack.rollout.simulated import SimulatedEngine
from treepack.trajectory import Int32

STOP, PROMPT, SIZE, GOAL = 0, 11, 3, (2, 2)
MOVES = {1: (0, -1), 2: (1, 0), 3: (0, 1), 4: (-1, 0)}


class Maze:
    """A square of 3 by 3 places. The episode is over at the corner, and its reward is 1 over the number of turns."""

    open = 0
    most_open = 0
    observed = 0

    def __init__(self, fields: dict[str, Any], tokenizer: Any) -> None:
        self.place = tuple(fields.get("start", (0, 0)))
        self.turns = 0
        Maze.open += 1
        Maze.most_open = max(Maze.open, Maze.most_open)

    def prompt(self) -> list[int]:
        """Return the one token of the prompt."""
        return [PROMPT]

    def observe(self, response_ids: list[int]) -> list[int] | None:
        """Move, and return the place reached, None for the goal."""
        Maze.observed += 1
        self.turns += 1
        self.place = moved(self.place, response_ids)
        return None if self.place == GOAL else [5 + self.place[0], 8 + self.place[1]]

    def reward(self) -> float:
        """Return 1 / turns at the goal, and 0 elsewhere."""
        return 1 / self.turns if self.place == GOAL else 0.0

    def close(self) -> None:
        """Count the environment out."""
        Maze.open -= 1


class SnapshotMaze(Maze):
    """The same with copies of its state."""

    def snapshot(self) -> Any:
        """Return place and number of turns."""
        return self.place, self.turns

    def restore(self, snapshot: Any) -> None:
        """Take over place and number of turns."""
        self.place, self.turns = snapshot


def moved(place: tuple[int, ...], response_ids: list[int]) -> tuple[int, ...]:
    """Return the place after the moves in `response_ids`; walls stop a move."""
    for token in response_ids:
        if token in MOVES:
            step = np.add(place, MOVES[token]).clip(0, SIZE - 1)
            place = (int(step[0]), int(step[1]))
    return place


def reward_of(ids: Int32) -> float:
    """Return the reward of a whole path, counted from its token ids alone."""
    place: tuple[int, ...] = (0, 0)
    for turns, turn in enumerate("".join(map(chr, ids.tolist())).split(chr(STOP))[:-1], 1):
        place = moved(place, [ord(token) for token in turn])
        if place == GOAL:
            return 1 / turns
    return 0.0


def maze_engine() -> SimulatedEngine:
    """Return an engine that moves anywhere, mostly east and south, and ends a turn after two moves in the mean."""
    transition = np.zeros((12, 12))
    transition[:, 1:5] = [0.1, 0.4, 0.4, 0.1]
    transition[1:5] *= 0.5
    transition[1:5, STOP] = 0.5
    return SimulatedEngine(MarkovLaw(transition, stop=STOP))

"""Task B: fetch a key in a maze with pits, and open a door with it. One action a turn, at most 24 turns.

    prompt        <maze> 5 key 3 1 door 0 4 ?   and the first observation
    turn          east                          north east south west take open; the word ends the turn
    observation   empty 1 0 wall floor pit floor
                  hands, x, y, and the cells in the north, east, south and west

Walls stop a move, and a pit ends the episode. `take` works on the cell of the key, `open` beside the door with the key
in hand; this ends the episode with reward 1. All other ends have reward 0. The level of a maze is its width, 5 .. 9.
Everything is a function of the maze's seed and the actions, so every prefix can be continued.

Paths of the warm-up take the action of a perfect player, or with a probability `noise` any of the six.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from words import ACTIONS, ID, encode

from treepack.rollout.environment import start_episode
from treepack.rollout.episode import Episode
from treepack.rollout.query import Query
from treepack.trajectory import Int32

LEVELS = range(5, 10)
MAX_TURNS = 24
OBSERVATION = 7  # tokens
MAX_TOKENS = MAX_TURNS * (1 + OBSERVATION)
STOP_TOKENS = tuple(ID[action] for action in ACTIONS)
MOVES = {"north": (0, -1), "east": (1, 0), "south": (0, 1), "west": (-1, 0)}
WALL, FLOOR, PIT = 0, 1, 2

Cell = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Dial:
    """Difficulty of all mazes of a run besides their level.

    `walls` and `pits` are shares of the cells, `noise` the probability of a random action in paths of the warm-up, and
    `longest` the maximum number of turns that the best path needs.
    """

    walls: float = 0.15
    pits: float = 0.12
    noise: float = 0.5
    longest: int = 16


@dataclass(frozen=True, slots=True)
class Maze:
    """A maze. `grid` has rows of WALL, FLOOR and PIT; the door is a wall, and start and key are on the floor.

    `to_key` and `to_door` are the numbers of moves from a cell to the key, and to the next cell beside the door;
    cells from which there is no way are missing.
    """

    size: int
    grid: tuple[tuple[int, ...], ...]
    start: Cell
    key: Cell
    door: Cell
    to_key: dict[Cell, int] = field(repr=False)
    to_door: dict[Cell, int] = field(repr=False)

    def kind(self, cell: Cell) -> int:
        """Return the kind of a cell; outside there are walls."""
        x, y = cell
        return self.grid[y][x] if 0 <= x < self.size and 0 <= y < self.size else WALL

    def shortest(self) -> int:
        """Return the number of turns of the best path: the ways to the key and from there to the door, and 2."""
        return self.to_key[self.start] + self.to_door[self.key] + 2


@dataclass(frozen=True, slots=True)
class State:
    """The world after some turns. `outcome` is None while the episode continues, else the reward."""

    maze: Maze
    cell: Cell
    has_key: bool = False
    turns: int = 0
    outcome: float | None = None

    def after(self, action: str) -> State:
        """Return the state after an action."""
        maze, cell, has_key = self.maze, self.cell, self.has_key
        outcome = None
        if action in MOVES:
            target = _beside(cell, action)
            if maze.kind(target) != WALL:
                cell = target
            if maze.kind(cell) == PIT:
                outcome = 0.0
        elif action == "take":
            has_key = has_key or cell == maze.key
        elif has_key and any(_beside(cell, move) == maze.door for move in MOVES):
            outcome = 1.0
        turns = self.turns + 1
        if outcome is None and turns == MAX_TURNS:
            outcome = 0.0
        return replace(self, cell=cell, has_key=has_key, turns=turns, outcome=outcome)

    def observation(self) -> str:
        """Return the words that the policy sees."""
        around = [self._word(_beside(self.cell, move)) for move in MOVES]
        return f"{'key' if self.has_key else 'empty'} {self.cell[0]} {self.cell[1]} {' '.join(around)}"

    def _word(self, cell: Cell) -> str:
        if cell == self.maze.door:
            return "door"
        if cell == self.maze.key and not self.has_key:
            return "key"
        return ("wall", "floor", "pit")[self.maze.kind(cell)]

    def best_action(self) -> str:
        """Return the first action of a best path from here."""
        distances = self.maze.to_door if self.has_key else self.maze.to_key
        if distances[self.cell] == 0:
            return "open" if self.has_key else "take"
        return min(MOVES, key=lambda move: distances.get(_beside(self.cell, move), MAX_TURNS**2))


@functools.lru_cache(maxsize=1 << 16)
def make_maze(seed: int, size: int, dial: Dial) -> Maze:
    """Return the maze of a seed: the first random one that can be solved in `dial.longest` turns."""
    rng = np.random.default_rng([seed, size, 3])
    while True:
        kinds = rng.choice([WALL, PIT, FLOOR], (size, size), p=[dial.walls, dial.pits, 1 - dial.walls - dial.pits])
        cells = rng.choice(size * size, 3, replace=False).tolist()
        start, key, door = ((cell % size, cell // size) for cell in cells)
        kinds[start[1], start[0]] = kinds[key[1], key[0]] = FLOOR
        kinds[door[1], door[0]] = WALL
        maze = Maze(size, tuple(map(tuple, kinds.tolist())), start, key, door, {}, {})
        beside_door = [cell for move in MOVES if maze.kind(cell := _beside(door, move)) == FLOOR]
        maze = replace(maze, to_key=_distances(maze, [key]), to_door=_distances(maze, beside_door))
        if start in maze.to_key and key in maze.to_door and maze.shortest() <= dial.longest:
            return maze


def _distances(maze: Maze, goals: Sequence[Cell]) -> dict[Cell, int]:
    """Return the number of moves over the floor from each cell to the nearest goal."""
    distances = dict.fromkeys(goals, 0)
    waiting = deque(goals)
    while waiting:
        cell = waiting.popleft()
        for move in MOVES:
            new = _beside(cell, move)
            if new not in distances and maze.kind(new) == FLOOR:
                distances[new] = distances[cell] + 1
                waiting.append(new)
    return distances


def _beside(cell: Cell, move: str) -> Cell:
    step = MOVES[move]
    return cell[0] + step[0], cell[1] + step[1]


def prompt_ids(maze: Maze) -> Int32:
    """Return the token ids of the prompt, with the first observation."""
    (key_x, key_y), (door_x, door_y) = maze.key, maze.door
    first = State(maze, maze.start).observation()
    return encode(f"<maze> {maze.size} key {key_x} {key_y} door {door_x} {door_y} ? {first}")


class MazeEnvironment:
    """An `Environment` of treepack.rollout; asynchronous, because worker threads would cost more than a turn."""

    def __init__(self, maze: Maze) -> None:
        """Start in the maze's first state."""
        self._state = State(maze, maze.start)

    async def prompt(self) -> list[int]:
        """Return the prompt."""
        return [int(token) for token in prompt_ids(self._state.maze)]

    async def observe(self, response_ids: list[int]) -> list[int] | None:
        """Take the action that ends the turn, and return the next observation, or None at the end."""
        self._state = self._state.after(ACTIONS[STOP_TOKENS.index(response_ids[-1])])
        return None if self._state.outcome is not None else encode(self._state.observation()).tolist()

    async def reward(self) -> float:
        """Return 1.0 if the door is open, else 0.0."""
        return self._state.outcome or 0.0

    async def snapshot(self) -> State:
        """Return the state, which is a value."""
        return self._state

    async def restore(self, snapshot: State) -> None:
        """Take over a state."""
        self._state = snapshot


def queries(num: int, *, seed: int, dial: Dial, levels: Sequence[int] = LEVELS) -> list[Query]:
    """Return `num` random mazes whose levels take turns. Fields: `maze_seed`, `level`, and `shortest` in turns."""
    rng = np.random.default_rng([seed, 1])
    made = []
    for number in range(num):
        maze_seed, level = int(rng.integers(2**31)), levels[number % len(levels)]
        maze = make_maze(maze_seed, level, dial)
        key = f"maze-{seed}-{number}"
        fields = {"maze_seed": maze_seed, "level": level, "shortest": maze.shortest()}
        made.append(Query(key, key, prompt_ids(maze), fields=fields))
    return made


async def start(query: Query, dial: Dial) -> tuple[Int32, Episode]:
    """Return the prompt of a query, or of a prefix with its turns, and its episode."""

    async def environment(fields: dict[str, Any], tokenizer: Any) -> MazeEnvironment:
        return MazeEnvironment(make_maze(int(fields["maze_seed"]), int(fields["level"]), dial))

    return await start_episode(environment, query, stop_token_ids=STOP_TOKENS)


def examples(num: int, *, seed: int, dial: Dial, levels: Sequence[int] = LEVELS) -> list[tuple[Int32, Int32]]:
    """Return `num` paths for the warm-up: token ids, and 1 for each token to train, int32 [n] each."""
    rng = np.random.default_rng([seed, 2])
    made = []
    for number in range(num):
        # A maze takes as long as eight paths, and paths through it differ by their random actions.
        if number % 8 == 0:
            maze = make_maze(int(rng.integers(2**31)), levels[number // 8 % len(levels)], dial)
        made.append(_path(maze, rng, dial.noise))
    return made


def _path(maze: Maze, rng: np.random.Generator, noise: float) -> tuple[Int32, Int32]:
    state, words = State(maze, maze.start), []
    while state.outcome is None:
        action = ACTIONS[rng.integers(len(ACTIONS))] if rng.random() < noise else state.best_action()
        state = state.after(action)
        words.append(action if state.outcome is not None else f"{action} {state.observation()}")
    ids = np.concatenate([prompt_ids(maze), encode(" ".join(words))])
    return ids, np.isin(ids, STOP_TOKENS).astype(np.int32)

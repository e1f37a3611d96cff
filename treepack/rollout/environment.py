"""Environments and reward functions that users write, as episodes of a sampler.

    prompt() -> ids         observe(turn) -> ids, or None when the episode is over         reward() -> number or None

An episode is a value that several paths continue, and an environment is an object that changes. So each path has an
environment of its own. The first path that continues a state takes over its environment; each further one gets a new
environment that is brought to this state:

    fork after turn 2:    with snapshot and restore    new environment, restore(snapshot after turn 2)
                          without                      new environment, prompt(), observe(turn 1), observe(turn 2)

A replay compares every observation with the recorded one, so an environment that is not deterministic is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from treepack.errors import TreepackError
from treepack.rollout.query import Query
from treepack.rollout.rewards import checked_reward
from treepack.rollout.tree import NO_TOKENS
from treepack.rollout.user_code import call, name_of_code, uninterrupted
from treepack.trajectory import Int32

METHODS = ("prompt", "observe", "reward")
OPTIONAL_METHODS = ("snapshot", "restore", "truncate", "close")


class Environment(Protocol):
    """The world of one task. Its methods may be plain or asynchronous.

    Plain methods run in worker threads, one at a time for an environment, but not always in the same thread. An object
    that belongs to one thread, such as a connection to SQLite, needs asynchronous methods.

    Optional methods:
        snapshot() -> Any: a copy of the state, which later calls do not change.
        restore(snapshot: Any) -> None: bring a new environment, whose `prompt` was not called, to the state of a
            snapshot. A snapshot may be restored several times.
        truncate(response_ids: list[int]) -> None: called before `reward` if a limit cut off the last turn. Without it
            the reward is that of the state after the last complete turn.
        close() -> None: release files, processes and connections of the environment.
    """

    def prompt(self) -> Sequence[int] | Awaitable[Sequence[int] | None] | None:
        """Return the token ids of the prompt, or None if the record of the task contains them. Called first."""
        ...

    def observe(self, response_ids: list[int], /) -> Sequence[int] | Awaitable[Sequence[int] | None] | None:
        """Return the token ids that follow a turn of the policy, or None if the episode is over.

        `response_ids` ends with the stop token, unless the turn was ended by an answer. The returned ids are
        everything between this turn and the next one, such as the header of the next message.
        """
        ...

    def reward(self) -> float | Awaitable[float | None] | None:
        """Return the reward of the path, or None for no reward. Called last."""
        ...


EnvironmentFactory = Callable[[dict[str, Any], Any], Environment | Awaitable[Environment]]
"""Makes the environment of a task from the fields of its record, and the tokenizer or None."""


async def start_episode(
    factory: EnvironmentFactory, query: Query, tokenizer: Any = None, *, stop_token_ids: Collection[int] = ()
) -> tuple[Int32, _EnvironmentEpisode]:
    """Return the prompt of a task, int32 [n], and its episode, which `sample_tree` closes.

    A query without ids gets the environment's `prompt`. For a prefix, the turns in `query.turns` are replayed,
    and the observations compared with the ids between the turns. If the prefix ends inside an observation, or with a
    complete turn, that is with one of `stop_token_ids`, the returned prompt has the whole observation.

    Raises:
        TreepackError: the environment raises, gives other ids than the query, or ends inside a prefix.
    """
    world = _QueryEnvironments(factory, dict(query.fields), tokenizer, query.where)
    try:
        live = await world.new()
        world.first_ids = await world.prompt(live)
        prompt = _prompt_of(query, world)
        # The sampler continues a turn whose start is in the prefix.
        is_begun = len(query.begun_turn) > 0 and int(query.begun_turn[-1]) not in stop_token_ids
        spans = query.turns[:-1] if is_begun else query.turns
        # prompt 3 tokens, turns [3, 5) and [7, 9), 10 tokens -> observations [5, 7) and [9, 10)
        ends = [begin for begin, _ in query.turns[1:]] + [len(query.prompt)]
        turns: tuple[_PolicyTurn, ...] = ()
        for (begin, end), next_begin in zip(spans, ends, strict=False):
            observation = await world.observe(live, query.prompt[begin:end])
            if observation is None:
                raise world.error(f"ends the episode after turn {len(turns) + 1} of the prefix; continue shorter ones")
            recorded = query.prompt[end:next_begin]
            if next_begin == len(query.prompt):
                # The prefix ends in this observation: recorded [6], observation [6, 8] -> the prompt gets the 8.
                prompt = np.concatenate([prompt, observation[len(recorded) :]])
                world.compare(observation[: len(recorded)], recorded, f"observation {len(turns) + 1}")
            else:
                world.compare(observation, recorded, f"observation {len(turns) + 1}")
            turns += (_PolicyTurn(query.prompt[begin:end], observation),)
        episode = _EnvironmentEpisode(world, turns, live)
        await world.take_snapshot(live, episode)
        return prompt, episode
    except BaseException:
        await world.close()
        raise


def _prompt_of(query: Query, world: _QueryEnvironments) -> Int32:
    first = world.first_ids
    recorded = query.prompt[: query.turns[0][0]] if query.turns else query.prompt
    if first is None:
        if len(recorded) == 0:
            raise world.error("returned None for the prompt, and the record has no prompt; return token ids")
        return query.prompt
    if len(recorded) == 0:
        return first
    world.compare(first, recorded, "the prompt")
    return query.prompt


@dataclass(frozen=True, slots=True)
class _PolicyTurn:
    """A turn of the policy, and the observation that followed, None at the end of the episode."""

    response: Int32
    observation: Int32 | None


@dataclass(slots=True)
class _QueryEnvironments:
    """The part that all states of one query share: the factory, and the environments that are open.

    `first_ids` are what `prompt` returned first, with which every further environment must agree.
    """

    factory: EnvironmentFactory
    fields: dict[str, Any]
    tokenizer: Any
    where: str
    first_ids: Int32 | None = None
    can_truncate: bool = False
    is_closed: bool = False
    open: list[Environment] = field(default_factory=list)
    snapshots: dict[_EnvironmentEpisode, Any] = field(default_factory=dict)

    def error(self, problem: str) -> TreepackError:
        """Return the error of a `problem` with the environments."""
        return TreepackError(f"{self.where}: {name_of_code(self.factory)} {problem}")

    async def new(self) -> Environment:
        """Return a new environment, which counts as open."""
        environment = await uninterrupted(self._made())
        missing = [method for method in METHODS if not callable(getattr(environment, method, None))]
        if missing:
            raise self.error(
                f"returned an object of type {type(environment).__name__} without {', '.join(missing)}; "
                f"an environment has the methods {', '.join(METHODS)}"
            )
        if hasattr(environment, "snapshot") != hasattr(environment, "restore"):
            raise self.error("returned an environment with only one of snapshot and restore; write both or none")
        self.can_truncate = hasattr(environment, "truncate")
        return environment  # type: ignore[no-any-return]

    async def _made(self) -> Any:
        assert not self.is_closed
        environment = await call(self.factory, dict(self.fields), self.tokenizer, where=self.where)
        self.open.append(environment)
        return environment

    async def prompt(self, environment: Environment) -> Int32 | None:
        """Return the environment's own prompt, or None."""
        ids = await call(environment.prompt, where=self.where)
        return None if ids is None else self._checked_ids(ids, "prompt", "encode its text")

    async def observe(self, environment: Environment, turn: Int32) -> Int32 | None:
        """Return the observation after a turn, or None at the end of the episode."""
        ids = await call(environment.observe, turn.tolist(), where=self.where)
        return None if ids is None else self._checked_ids(ids, "observe", "return None at the end of the episode")

    async def take_snapshot(self, environment: Environment, state: _EnvironmentEpisode) -> None:
        """Keep a copy of the state, unless the environments are replayed."""
        if hasattr(environment, "snapshot"):
            self.snapshots[state] = await call(environment.snapshot, where=self.where)

    def compare(self, ids: Int32, recorded: Int32, part: str) -> None:
        """Refuse ids of the environment that differ from the recorded ones of the same `part`."""
        if np.array_equal(ids, recorded):
            return
        size = min(len(ids), len(recorded))
        # [5, 6, 7] and [5, 9] -> token 1; [5, 6, 7] and [5, 6] -> token 2, which only one of them has
        at = int(np.argmax(np.append(ids[:size] != recorded[:size], True)))
        raise self.error(
            f"gives other ids than the record from token {at} of {part} on; "
            "use the tokenizer, the chat template and the fields of the record"
        )

    async def replay(self, environment: Environment, turns: tuple[_PolicyTurn, ...]) -> None:
        """Bring a new environment to the state after `turns`, and check that it answers as before."""
        remedy = "write snapshot and restore, because the environment is not deterministic"
        if not _equal(await self.prompt(environment), self.first_ids):
            raise self.error(f"returned another prompt than before; {remedy}")
        for number, turn in enumerate(turns, 1):
            if not _equal(await self.observe(environment, turn.response), turn.observation):
                raise self.error(f"answered turn {number} with other tokens than before; {remedy}")

    async def finish(self, environment: Environment, unfinished: Int32) -> float | None:
        """Return the reward of an environment after an `unfinished` turn, and close the environment."""
        if len(unfinished):
            await call(environment.truncate, unfinished.tolist(), where=self.where)  # type: ignore[attr-defined]
        value = await call(environment.reward, where=self.where)
        await self._close(environment)
        return checked_reward(value, f"{self.where}: {name_of_code(environment.reward)}")

    async def close(self) -> None:
        """Forget the snapshots, and close all environments that a failure or a cancellation has left open."""
        self.is_closed = True
        self.snapshots.clear()
        # An error of `close` must not hide the one for which everything is closed.
        await asyncio.gather(*map(self._close, self.open), return_exceptions=True)

    async def _close(self, environment: Environment) -> None:
        self.open = [each for each in self.open if each is not environment]
        if hasattr(environment, "close"):
            await uninterrupted(call(environment.close, where=self.where))

    def _checked_ids(self, ids: Any, method: str, remedy: str) -> Int32:
        try:
            values = np.asarray(None if isinstance(ids, str | bytes | Mapping) else ids)
        except ValueError:  # lists of different lengths in a list
            values = np.asarray(None)
        if values.ndim != 1 or not (len(values) == 0 or np.issubdtype(values.dtype, np.integer)):
            raise self.error(
                f"returned a value of type {type(ids).__name__} from {method}; expected a list of token ids"
            )
        if len(values) == 0:
            raise self.error(f"returned no token ids from {method}; {remedy}")
        if values.min() < 0 or values.max() >= 2**31:
            raise self.error(f"returned {values.min()} .. {values.max()} from {method}; expected token ids, from 0 on")
        return values.astype(np.int32)


def _equal(ids: Int32 | None, before: Int32 | None) -> bool:
    return ids is before is None or (ids is not None and before is not None and np.array_equal(ids, before))


class _EnvironmentEpisode:
    """The state after some turns: an `Episode` of the sampler. See the head of this file."""

    def __init__(self, world: _QueryEnvironments, turns: tuple[_PolicyTurn, ...], live: Environment) -> None:
        """Take over `live`, an environment in the state after `turns`."""
        self._world = world
        self._turns = turns
        self._live: Environment | None = live
        self._rewards: list[float | None] = []
        self._reward_lock = asyncio.Lock()

    async def after(self, turn: Int32) -> tuple[_EnvironmentEpisode, Int32 | None]:
        """Let an environment in this state observe `turn`, and return the new state and the observation.

        Raises:
            TreepackError: the environment raised, returned something else than token ids or None, or is not
                deterministic although it has no snapshots.
        """
        world, live = self._world, await self._take()
        observation = await world.observe(live, turn)
        state = _EnvironmentEpisode(world, (*self._turns, _PolicyTurn(turn, observation)), live)
        if observation is not None:  # nothing continues the end of an episode
            await world.take_snapshot(live, state)
        return state, observation

    async def reward(self, unfinished: Int32) -> float | None:
        """Return the reward of this state; `unfinished` goes to the environment's `truncate` if there is one.

        Raises:
            TreepackError: the environment raised, or returned something else than a finite number or None.
        """
        if len(unfinished) and self._world.can_truncate:
            return await self._world.finish(await self._take(), unfinished)
        # All paths that a limit cuts off in this state have the same reward, so it is asked for once.
        async with self._reward_lock:
            if not self._rewards:
                self._rewards.append(await self._world.finish(await self._take(), NO_TOKENS))
        return self._rewards[0]

    async def close(self) -> None:
        """Close the environments of all states."""
        await self._world.close()

    async def _take(self) -> Environment:
        """Return an environment in this state that belongs to the caller alone."""
        world, live = self._world, self._live
        self._live = None
        if live is not None:
            return live
        new = await world.new()
        if self in world.snapshots:
            await call(new.restore, world.snapshots[self], where=world.where)  # type: ignore[attr-defined]
        else:
            await world.replay(new, self._turns)
        return new

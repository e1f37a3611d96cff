"""Sample the trees of many queries into one file: `treepack rollout` as a function.

    queries, engine, options --sample_rollouts--> rollouts.jsonl, RolloutSummary

Every query has a separate coroutine. Its tree is appended to the file in the moment in which it is complete, so an
interrupt, a failure of a different query or a killed process loses no finished tree.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from treepack.errors import TreepackError
from treepack.files.remote.address import AnyPath
from treepack.processes import Progress, ReportProgress
from treepack.rollout.engine import Engine, Segment
from treepack.rollout.episode import Episode, SingleTurn
from treepack.rollout.options import RolloutOptions, Sampling, TreeOptions
from treepack.rollout.output import RolloutFile, open_output, waiting_queries
from treepack.rollout.query import Query
from treepack.rollout.records import tree_lines
from treepack.rollout.requests import LimitedEngine, run_queries
from treepack.rollout.sampler import sample_tree
from treepack.rollout.summary import RolloutSummary, TreeTally
from treepack.trajectory import Int32

StartEpisode = Callable[[Query], Awaitable[tuple[Int32, Episode]]]


async def sample_rollouts(
    queries: Sequence[Query],
    engine: Engine,
    options: TreeOptions,
    *,
    out: str | AnyPath,
    run: RolloutOptions = RolloutOptions(),  # noqa: B008 (immutable)
    start: StartEpisode | None = None,
    progress: ReportProgress | None = None,
) -> RolloutSummary:
    """Sample a tree for each query and append its rollouts to the file `out` (JSON lines).

    Args:
        queries: prompts or prefixes, with distinct keys.
        engine: continues token ids; it stays open.
        options: shape of the trees.
        out: a new file, or with `run.resume` one whose finished trees are not sampled again.
        run: seed, limits and attempts.
        start: returns the prompt of a query and its episode; by default a single turn without a reward.
        progress: called with the tokens decoded so far.

    Returns:
        The figures of the trees of this call.

    Raises:
        TreepackError: bad options or queries, an output that cannot be used, or a failure of the engine, an environment
            or a reward; trees that were finished before stay in `out`.
    """
    begin = time.monotonic()
    with open_output(out, _settings(engine.sampling, options, run), resume=run.resume) as file:
        waiting = waiting_queries(list(queries), file)
        tally = TreeTally()
        counting = _CountingEngine(
            LimitedEngine(engine, max_requests=run.concurrency, attempts=run.attempts, timeout=run.timeout),
            tally,
            len(waiting),
            progress,
        )

        async def sample(query: Query) -> None:
            prompt, episode = (query.prompt, SingleTurn()) if start is None else await start(query)
            prompted = replace(query, prompt=prompt)
            tree = await sample_tree(prompted, counting, options, episode=episode, seed=run.seed)
            # Nothing is awaited from here on, so a cancelled run has either written the whole tree or none of it.
            file.append(tree_lines(tree))
            tally.add(tree)
            counting.report()

        try:
            coroutines = (partial(sample, query) for query in waiting)
            async with aclosing(run_queries(coroutines, max_queries=run.max_queries)) as done:
                async for _ in done:
                    pass
        except TreepackError as error:
            raise TreepackError(f"{error}; {_state(file, len(queries))}") from error
        return tally.summary(
            num_before=len(file.finished), num_removed=file.num_removed, seconds=time.monotonic() - begin
        )


def _state(file: RolloutFile, num_queries: int) -> str:
    finished = len(file.finished) + file.num_appended
    if finished == 0:
        return "no tree was finished"
    return f"{finished:,} of {num_queries:,} trees are in {file.path}, continue with --resume"


def _settings(sampling: Sampling, options: TreeOptions, run: RolloutOptions) -> dict[str, Any]:
    """Return all options on which the samples depend, besides the queries, as JSON values."""
    shape = asdict(replace(options, is_answer=None))
    del shape["is_answer"]
    return {**run.settings, "seed": run.seed, **shape, **asdict(sampling)}


class _CountingEngine:
    """An engine that reports its decoded tokens as progress."""

    def __init__(self, engine: Engine, tally: TreeTally, num_queries: int, progress: ReportProgress | None) -> None:
        self.engine = engine
        self._tally = tally
        self._num_queries = num_queries
        self._progress = progress
        self._decoded = 0

    @property
    def sampling(self) -> Sampling:
        return self.engine.sampling

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        segments = await self.engine.extend(ids, count=count, max_tokens=max_tokens, seed=seed)
        self._decoded += sum(len(segment.tokens) for segment in segments)
        self.report()
        return segments

    async def publish(self, version: str) -> None:
        await self.engine.publish(version)

    async def close(self) -> None:
        await self.engine.close()

    def report(self) -> None:
        if self._progress is not None:
            share = self._tally.num_trees / self._num_queries if self._num_queries else None
            self._progress(Progress("sampling", self._decoded, None, "tokens", share))

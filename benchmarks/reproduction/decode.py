"""A fast sampler for the small policies: all requests that wait are decoded as one batch, from a static cache.

    extend, extend, ... --wait until no more arrive--> prefill of the distinct prompts -> one token for all rows, again
                                                       and again -> Segments

    rows  0 1 2 3 4 5 6 7     steps 1, 2, 4, 8, 8, ...: after each group the rows that have ended are counted;
          0 . 2 . . . 6 .     when at most half of the bucket is left, the rest moves together: rows 0 2 6

`DecodeEngine` is an engine of `treepack.rollout`. It runs the modules of the model that is being trained, so there is
no copy of the weights; after a step of the optimiser, await `publish`. On a GPU each step is a CUDA graph, one for each
number of rows (a power of two) and size of the cache (a multiple of 64); on the CPU the same code runs as it is. If a
graph cannot be captured, this is printed once, and all steps run without graphs.

A continuation depends on its ids, seed and number, whatever else is in the batch, except for rounding. probe.py
measures the speed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from cached_forward import make_cache, next_logits, prefill
from quantiles import quantile_tokens, uniform_numbers
from torch import Tensor

from treepack.errors import TreepackError
from treepack.rollout.engine import LENGTH, STOP, EngineError, Sampling, Segment
from treepack.trajectory import Int32

QUIET_TICKS = 48  # turns of the event loop without a request after which a batch starts
STEPS = (1, 2, 4, 8)  # steps between two looks at the rows that have ended; the last number repeats
PREFILL_TOKENS = 1 << 16  # tokens of one pass over prompts
CACHE_STEP = 64


@dataclass(frozen=True, slots=True)
class Request:
    """Continue `ids` int32 [n] `count` times by 1 to `max_tokens` tokens each."""

    ids: Int32
    count: int
    max_tokens: int
    seed: int


@dataclass(slots=True)
class Counts:
    """Tokens and passes of an engine since its start: `prefilled` counts each distinct prompt of a batch once."""

    decoded: int = 0
    prefilled: int = 0
    steps: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """State of the rows of a batch, [B] each: views of buffers that stay at their addresses.

    `row` is the line of the output, `token` the last token, `position` the number of tokens before it, `count` the
    number of tokens sampled so far, and `limit` their maximum.
    """

    row: Tensor
    token: Tensor
    position: Tensor
    count: Tensor
    limit: Tensor
    alive: Tensor

    def parts(self) -> tuple[Tensor, ...]:
        return self.row, self.token, self.position, self.count, self.limit, self.alive

    def first(self, size: int) -> _Rows:
        return _Rows(*(part[:size] for part in self.parts()))


class DecodeEngine:
    """Samples from a model of Qwen3's or Llama's shape in memory.

    Args:
        causal: the model, whole on one device; its weights may change in place between the batches.
        sampling: the distribution; only its temperature and its stop tokens may be set.
        rows: maximum number of sequences of a batch; more requests are decoded one batch after the other.
        longest: maximum number of tokens of a sequence.
        version: name of the policy until the first `publish`.

    Raises:
        TreepackError: `sampling` has top_p or top_k.
    """

    def __init__(
        self, causal: Any, sampling: Sampling, *, rows: int = 2048, longest: int = 256, version: str = ""
    ) -> None:
        if sampling.top_p < 1 or sampling.top_k:
            raise TreepackError("the decoder samples from the whole distribution; leave out top_p and top_k")
        self.counts = Counts()
        self._causal = causal
        self._sampling = sampling
        self._version = version
        self._max_rows = rows
        # Graphs exist for whole multiples only, and the last group of steps may exceed the longest sequence.
        self._longest = longest
        size = _rounded_up(longest + STEPS[-1], CACHE_STEP)
        device = causal.device
        self._cache = make_cache(causal, rows, size)
        row, token, position, count, limit = torch.zeros(5, rows, dtype=torch.int64, device=device)
        alive = torch.zeros(rows, dtype=torch.bool, device=device)
        self._rows = _Rows(row, token, position, count, limit, alive)
        # The last line belongs to rows that have ended.
        self._tokens = torch.zeros(rows + 1, longest, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(rows + 1, longest, dtype=torch.float32, device=device)
        self._uniform = torch.zeros(rows + 1, longest, dtype=torch.float64, device=device)
        self._is_stop = torch.zeros(causal.config.vocab_size, dtype=torch.bool, device=device)
        self._is_stop[list(sampling.stop_token_ids)] = True
        self.graphs = Graphs() if device.type == "cuda" else None
        self._waiting: list[tuple[Request, asyncio.Future[list[Segment]]]] = []
        self._batch: asyncio.Task[None] | None = None

    @property
    def sampling(self) -> Sampling:
        """The distribution that every call samples from."""
        return self._sampling

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        """Continue `ids` int32 [n] `count` times, by 1 to `max_tokens` tokens each, in a batch with other calls.

        Raises:
            EngineError: no ids, or a sequence that is longer than the engine's `longest`.
        """
        request = Request(ids, count, max_tokens, seed)
        self._check(request)
        answer: asyncio.Future[list[Segment]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._batch is None or self._batch.done():
            self._batch = asyncio.ensure_future(self._answer())
        return await answer

    async def publish(self, version: str) -> None:
        """Name the policy of the segments to come; no keys are kept between batches."""
        self._version = version

    async def close(self) -> None:
        """Free the graphs; the buffers are freed with the engine."""
        self.graphs = None if self.graphs is None else Graphs()

    async def _answer(self) -> None:
        quiet, num_waiting = 0, 0
        while quiet < QUIET_TICKS:
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._waiting) == num_waiting else 0
            num_waiting = len(self._waiting)
        # A caller that was cancelled no longer waits.
        waiting = [(request, answer) for request, answer in self._waiting if not answer.done()]
        self._waiting.clear()
        try:
            segments = self.decode([request for request, _ in waiting])
        except Exception as error:
            for _, answer in waiting:
                answer.set_exception(error)
            return
        for (_, answer), each in zip(waiting, segments, strict=True):
            answer.set_result(each)

    @torch.no_grad()
    def decode(self, requests: Sequence[Request]) -> list[list[Segment]]:
        """Answer requests without an event loop.

        Raises:
            EngineError: a request has no ids, or a sequence would be longer than the engine's `longest`.
        """
        for request in requests:
            self._check(request)
        # (request, number of its continuation) for each row
        rows = [(request, number) for request in requests for number in range(request.count)]
        segments: list[Segment] = []
        for begin in range(0, len(rows), self._max_rows):
            segments += self._decode_rows(rows[begin : begin + self._max_rows])
        answers, begin = [], 0
        for request in requests:
            answers.append(segments[begin : begin + request.count])
            begin += request.count
        return answers

    def _check(self, request: Request) -> None:
        total = len(request.ids) + request.max_tokens
        if not len(request.ids):
            raise EngineError("a prompt has no tokens; expected at least one token id to continue")
        if total > self._longest:
            raise EngineError(
                f"a prompt of {len(request.ids)} tokens and {request.max_tokens} more exceed the {self._longest} "
                "tokens of the decoder; make it with a larger `longest`, or lower max_tokens"
            )

    def _decode_rows(self, rows: list[tuple[Request, int]]) -> list[Segment]:
        if self.graphs is not None:
            self.graphs.forget_moved(self._causal)
        self._fill(rows)
        self._prefill([request.ids for request, _ in rows])
        longest = max(len(request.ids) for request, _ in rows)
        most = max(request.max_tokens for request, _ in rows)
        size, done, alive = self._bucket(len(rows)), 0, len(rows)
        self.counts.batches += 1
        while alive:
            num_steps = min(STEPS[min(len(STEPS) - 1, done.bit_length())], most - done)
            cache_size = min(_rounded_up(longest + done + num_steps, CACHE_STEP), self._cache.shape[4])
            for _ in range(num_steps):
                self.step(size, cache_size)
            done += num_steps
            self.counts.steps += num_steps
            living = self._rows.alive[:size].nonzero().squeeze(1)  # waits for the device
            alive = len(living)
            if alive > 0 and self._bucket(alive) <= size // 2:
                self._move(living, size := self._bucket(alive), cache_size)
        return self._segments(rows)

    def _fill(self, rows: list[tuple[Request, int]]) -> None:
        """Set the state of the first rows to that of new requests, and of all others to ended."""
        num, device = len(rows), self._tokens.device
        requests = [request for request, _ in rows]
        columns = {
            "row": np.arange(num),
            "token": np.array([request.ids[-1] for request in requests]),
            "position": np.array([len(request.ids) - 1 for request in requests]),
            "count": np.zeros(num, np.int64),
            "limit": np.array([request.max_tokens for request in requests]),
        }
        self._rows.alive.zero_()
        self._rows.alive[:num] = True
        self._rows.row.fill_(self._max_rows)
        for part in (self._rows.token, self._rows.position, self._rows.count, self._rows.limit):
            part.zero_()
        for name, values in columns.items():
            getattr(self._rows, name)[:num] = torch.from_numpy(values.astype(np.int64)).to(device)
        seeds = np.array([request.seed for request in requests], np.uint64)
        numbers = np.array([number for _, number in rows], np.uint64)
        width = max(request.max_tokens for request in requests)
        self._uniform[:num, :width] = torch.from_numpy(uniform_numbers(seeds, numbers, width)).to(device)

    def _prefill(self, prompts: list[Int32]) -> None:
        """Fill the cache with the keys of all prompts but their last tokens, which the first step computes."""
        rows_of: dict[bytes, list[int]] = {}
        for row, ids in enumerate(prompts):
            rows_of.setdefault(ids[:-1].tobytes(), []).append(row)
        distinct = sorted((np.frombuffer(key, np.int32) for key in rows_of if key), key=len)
        self.counts.prefilled += sum(map(len, distinct)) + len(prompts)
        while distinct:
            width = len(distinct[-1])
            part = distinct[-max(1, PREFILL_TOKENS // width) :]
            del distinct[-len(part) :]
            ids = np.zeros((len(part), width), np.int64)
            for line, prompt in zip(ids, part, strict=True):
                line[: len(prompt)] = prompt
            # Prompt 0 for rows 0, 2 and prompt 1 for row 1: source 0 0 1, target 0 2 1.
            targets = [rows_of[prompt.tobytes()] for prompt in part]
            source = np.repeat(np.arange(len(part)), [len(rows) for rows in targets])
            self._write_prompts(ids, source, np.concatenate(targets))

    def _write_prompts(self, ids: np.ndarray, source: np.ndarray, target: np.ndarray) -> None:
        device, width = self._tokens.device, ids.shape[1]
        at, to = (torch.from_numpy(part).to(device) for part in (source, target))

        def write(layer: int, keys: Tensor, values: Tensor) -> None:
            for cache, part in zip(self._cache[layer], (keys, values), strict=True):
                cache[to, :, :width] = part[at]

        prefill(self._causal, torch.from_numpy(ids).to(device), write)

    def step(self, size: int, cache_size: int) -> None:
        """Sample one token for each of the first `size` rows that is alive; their keys fit in `cache_size` places."""
        rows, cache = self._rows.first(size), self._cache[:, :, :size, :, :cache_size]
        if self.graphs is None:
            self._sample(rows, cache)
        else:
            self.graphs.run((size, cache_size), lambda: self._sample(rows, cache), rows.parts())

    def _sample(self, rows: _Rows, cache: Tensor) -> None:
        """Sample one token for each row that is alive; every tensor keeps its address and its shape."""
        logits = next_logits(self._causal, cache, rows.token, rows.position) / self._sampling.temperature
        logprobs = logits.log_softmax(-1)
        # Not torch.where with a number, which copies the number to the device, and a graph cannot contain that.
        line = rows.row.masked_fill(~rows.alive, self._max_rows)
        column = rows.count.masked_fill(~rows.alive, 0)
        new = quantile_tokens(logprobs, self._uniform[line, column])
        self._tokens.index_put_((line, column), new)
        self._logprobs.index_put_((line, column), logprobs.gather(1, new[:, None]).squeeze(1))
        rows.token.copy_(torch.where(rows.alive, new, rows.token))
        rows.count.add_(rows.alive)
        rows.position.add_(rows.alive)
        rows.alive.logical_and_(~self._is_stop[new] & (rows.count < rows.limit))

    def _move(self, living: Tensor, size: int, cache_size: int) -> None:
        """Move the rows that continue to the front; the others up to `size` have ended."""
        num = len(living)
        for part in self._rows.parts():
            part[:num] = part[living]
        self._rows.alive[num:size] = False
        for layer in self._cache:
            for part in layer:
                part[:num, :, :cache_size] = part[living, :, :cache_size]

    def _segments(self, rows: list[tuple[Request, int]]) -> list[Segment]:
        """Cut the outputs at the first stop token, or at the limit of the row."""
        tokens = self._tokens[: len(rows)].cpu().numpy().astype(np.int32)
        logprobs = self._logprobs[: len(rows)].cpu().numpy()
        limits = np.array([request.max_tokens for request, _ in rows])
        is_stop = np.isin(tokens, self._sampling.stop_token_ids) & (np.arange(tokens.shape[1]) < limits[:, None])
        has_stop = is_stop.any(axis=1)
        lengths = np.where(has_stop, is_stop.argmax(axis=1) + 1, limits)
        self.counts.decoded += int(lengths.sum())
        return [
            Segment(tokens[row, :length].copy(), logprobs[row, :length].copy(), finish, self._version)
            for row, (length, finish) in enumerate(
                zip(lengths.tolist(), np.where(has_stop, STOP, LENGTH).tolist(), strict=True)
            )
        ]

    def _bucket(self, num: int) -> int:
        """Return the number of rows that a step computes for `num` rows: a power of two on a GPU."""
        if self.graphs is None:
            return num
        return min(max(32, 1 << (num - 1).bit_length()), self._max_rows)


@dataclass(slots=True)
class Graphs:
    """CUDA graphs of steps by (rows, size of the cache), for weights at `addresses`.

    `is_off` is True after a capture that failed. All graphs share the memory `pool`.
    """

    graphs: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)
    addresses: tuple[int, ...] = ()
    is_off: bool = False
    pool: Any = None

    def forget_moved(self, causal: Any) -> None:
        """Drop all graphs if weights have moved in memory; changes in place need no new graphs."""
        addresses = tuple(weight.data_ptr() for weight in causal.parameters())
        if addresses != self.addresses:
            self._drop()
            self.addresses = addresses

    def _drop(self) -> None:
        self.graphs.clear()
        self.pool = None  # the memory of a pool ends with its last graph

    def run(self, key: tuple[int, int], step: Callable[[], None], state: tuple[Tensor, ...]) -> None:
        """Run `step`, which changes `state` in place, as a graph."""
        if self.is_off:
            step()
            return
        if key not in self.graphs:
            before = [part.clone() for part in state]
            self.rehearse(step)
            # The rehearsal has also written keys and outputs, which the graph writes again.
            for part, value in zip(state, before, strict=True):
                part.copy_(value)
            try:
                self.graphs[key] = self.capture(step)
            except RuntimeError as error:
                print(f"note: the decoder runs without CUDA graphs ({error})", file=sys.stderr, flush=True)
                self.is_off = True
                self._drop()
                step()
                return
        self.graphs[key]()

    def rehearse(self, step: Callable[[], None]) -> None:
        """Run a step beside the stream: the first run chooses kernels and allocates their memory."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats a step; the step itself does not run."""
        # Graphs share their memory, because no result of a step stays in it: all are copied to the buffers.
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            step()
        return graph.replay


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step

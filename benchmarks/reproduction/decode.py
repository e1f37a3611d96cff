"""A sampler for small policies: all requests that wait are decoded as one batch by transformers' own forward pass.

    extend, extend, ... --wait until no more arrive--> distinct prompts, padded on the left -> keys and values
                        --one token for every row, until all have ended--> Segments

`DecodeEngine` is an engine of `treepack.rollout`. Its model shares the weights of the model that is being trained, so
nothing is copied after a step of the optimiser. A continuation depends on its ids, seed and number, whatever else is in
the batch, except for rounding.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treepack.rollout.engine import LENGTH, STOP, Segment
from treepack.rollout.options import Sampling
from treepack.trajectory import Float64, Int32

QUIET_TICKS = 48  # turns of the event loop without a request after which a batch starts
UInt64 = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True, slots=True)
class Request:
    """Continue `ids` int32 [n] `count` times by 1 to `max_tokens` tokens each."""

    ids: Int32
    count: int
    max_tokens: int
    seed: int


def sampling_twin(causal: Any) -> Any:
    """Return a model with the same weights in memory, but transformers' own attention."""
    config = copy.deepcopy(causal.config)
    config._attn_implementation = "sdpa"
    twin = type(causal)(config).to(causal.device, causal.dtype).eval()
    twin.load_state_dict(causal.state_dict(), assign=True)
    twin.tie_weights()
    return twin


class DecodeEngine:
    """Samples from a causal model of transformers in memory.

    Args:
        causal: the model, whole on one device; its weights may change in place between the batches.
        sampling: the distribution, without top_p and top_k.
        rows: maximum number of sequences of a batch; more requests are decoded one batch after the other.
    """

    def __init__(self, causal: Any, sampling: Sampling, *, rows: int = 1024) -> None:
        self.causal = causal
        self._sampling = sampling
        self._max_rows = rows
        self._version = ""
        self._is_stop = torch.zeros(causal.config.vocab_size, dtype=torch.bool, device=causal.device)
        self._is_stop[list(sampling.stop_token_ids)] = True
        self._waiting: list[tuple[Request, asyncio.Future[list[Segment]]]] = []
        self._batch: asyncio.Task[None] | None = None

    @property
    def sampling(self) -> Sampling:
        """The distribution that every call samples from."""
        return self._sampling

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        """Continue `ids` int32 [n] `count` times, by 1 to `max_tokens` tokens each, in a batch with other calls."""
        answer: asyncio.Future[list[Segment]] = asyncio.get_running_loop().create_future()
        self._waiting.append((Request(ids, count, max_tokens, seed), answer))
        if self._batch is None or self._batch.done():
            self._batch = asyncio.ensure_future(self._answer())
        return await answer

    async def publish(self, version: str) -> None:
        """Name the policy of the segments to come; no keys are kept between batches."""
        self._version = version

    async def close(self) -> None:
        """Nothing is left to free."""

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
        """Answer requests without an event loop."""
        # (request, number of its continuation) for each row
        rows = [(request, number) for request in requests for number in range(request.count)]
        batches = (rows[begin : begin + self._max_rows] for begin in range(0, len(rows), self._max_rows))
        segments = (segment for batch in batches for segment in self._decode_batch(batch))
        return [list(islice(segments, request.count)) for request in requests]

    def _decode_batch(self, rows: list[tuple[Request, int]]) -> Iterator[Segment]:
        """Yield the continuation of each row."""
        device = self.causal.device
        limits = np.array([request.max_tokens for request, _ in rows])
        seeds = np.array([request.seed for request, _ in rows], np.uint64)
        numbers = np.array([number for _, number in rows], np.uint64)
        uniform = torch.from_numpy(uniform_numbers(seeds, numbers, limits.max())).to(device)
        limit = torch.from_numpy(limits).to(device)
        tokens = torch.zeros(uniform.shape, dtype=torch.int64, device=device)
        logprobs = torch.zeros(uniform.shape, dtype=torch.float32, device=device)
        # One state for each row that continues: its logits, its mask over the cache, its next position.
        logits, mask, position, cache = self._prefill([request.ids for request, _ in rows])
        alive = torch.arange(len(rows), device=device)
        for step in range(uniform.shape[1]):
            scores = (logits.float() / self._sampling.temperature).log_softmax(-1)
            new = quantile_tokens(scores, uniform[alive, step])
            tokens[alive, step] = new
            logprobs[alive, step] = scores.gather(1, new[:, None]).squeeze(1)
            going = (~self._is_stop[new] & (limit[alive] > step + 1)).nonzero().squeeze(1)
            if len(going) == 0:
                break
            if len(going) < len(alive):
                cache.batch_select_indices(going)
            alive, new, mask, position = alive[going], new[going], mask[going], position[going]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            out = self.causal(
                input_ids=new[:, None],
                attention_mask=mask,
                position_ids=position[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            logits, position = out.logits[:, -1], position + 1
        yield from self._segments(tokens.cpu().numpy().astype(np.int32), logprobs.cpu().numpy(), limits)

    def _prefill(self, prompts: list[Int32]) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Return logits [R, V], mask [R, N], next position [R] and cache of the prompts, each of which is read once."""
        lines = {ids: line for line, ids in enumerate(dict.fromkeys(prompt.tobytes() for prompt in prompts))}
        distinct = [np.frombuffer(ids, np.int32) for ids in lines]
        width = max(map(len, distinct))
        ids, mask = np.zeros((2, len(distinct), width), np.int64)
        for line, prompt in enumerate(distinct):
            ids[line, width - len(prompt) :] = prompt
            mask[line, width - len(prompt) :] = 1
        device = self.causal.device
        masks = torch.from_numpy(mask).to(device)
        positions = (masks.cumsum(1) - 1).clamp(min=0)
        out = self.causal(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=masks,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
        )
        index = torch.tensor([lines[prompt.tobytes()] for prompt in prompts], device=device)
        out.past_key_values.batch_select_indices(index)
        return out.logits[index, -1], masks[index], positions[index, -1] + 1, out.past_key_values

    def _segments(self, tokens: Int32, logprobs: np.ndarray, limits: np.ndarray) -> Iterator[Segment]:
        """Cut the outputs at the first stop token, or at the limit of the row."""
        is_stop = np.isin(tokens, self._sampling.stop_token_ids) & (np.arange(tokens.shape[1]) < limits[:, None])
        first = np.where(is_stop.any(axis=1), is_stop.argmax(axis=1), tokens.shape[1])
        lengths = np.minimum(first + 1, limits)
        for row, length in enumerate(lengths.tolist()):
            finish = STOP if first[row] < tokens.shape[1] else LENGTH
            yield Segment(tokens[row, :length].copy(), logprobs[row, :length].copy(), finish, self._version)


def quantile_tokens(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Return the token at the quantile `uniform` of each row, int64 [R].

        probabilities [0.2, 0.5, 0.3] -> sums [0.2, 0.7, 1.0], number 0.65: one sum is not above it -> token 1

    Args:
        logprobs: float32 [R, V].
        uniform: float64 [R], in [0, 1).
    """
    # float64, because in float32 the sums near 1 are multiples of 6e-8, more than many tokens' probabilities.
    sums = logprobs.double().exp().cumsum(-1)
    # The sums end at 1 up to rounding.
    return (sums <= uniform[:, None] * sums[:, -1:]).sum(-1).clamp_(max=logprobs.shape[1] - 1)


def uniform_numbers(seeds: UInt64, numbers: UInt64, width: int) -> Float64:
    """Return `width` numbers in [0, 1) for each pair of a seed and a number, float64 [R, width].

    They are the outputs of SplitMix64 (Steele, Lea and Flood, 2014) from a state that both determine.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    states = _mixed(_mixed(seeds + golden) + golden * (numbers + np.uint64(1)))
    steps = golden * np.arange(1, width + 1, dtype=np.uint64)
    # The upper 53 of 64 bits, because float64 has 53.
    return (_mixed(states[:, None] + steps) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(x: UInt64) -> UInt64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

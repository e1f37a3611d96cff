"""An engine that runs a model of transformers token by token: slow, repeatable, and exact by construction."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from treepack.rollout.engine import LENGTH, STOP, Segment
from treepack.rollout.options import Sampling
from treepack.trajectory import Int32


class ModelEngine:
    """Samples from `model` with its weights of the moment; `versions` are those published, `requests` the calls."""

    def __init__(self, model: Any, sampling: Sampling) -> None:
        self.model = model
        self.sampling = sampling
        self.versions: list[str] = []
        self.num_requests = 0

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        """Sample `count` continuations side by side, and end each one at its first stop token."""
        self.num_requests += 1
        draw = torch.Generator().manual_seed(seed)
        rows = torch.from_numpy(ids).long().repeat(count, 1)
        logprobs, stops = [], torch.tensor(self.sampling.stop_token_ids)
        with torch.no_grad():
            for _ in range(max_tokens):
                logits = self.model(rows, use_cache=False).logits[:, -1].float() / self.sampling.temperature
                probabilities = logits.softmax(-1)
                token = torch.multinomial(probabilities, 1, generator=draw)
                logprobs.append(logits.log_softmax(-1).gather(1, token)[:, 0])
                rows = torch.cat([rows, token], 1)
                if torch.isin(rows[:, len(ids) :], stops).any(1).all():
                    break
        new, values = rows[:, len(ids) :].numpy(), torch.stack(logprobs, 1).numpy()
        return [self._segment(tokens, each) for tokens, each in zip(new, values, strict=True)]

    def _segment(self, tokens: Any, logprobs: Any) -> Segment:
        stops = np.flatnonzero(np.isin(tokens, self.sampling.stop_token_ids))
        size = int(stops[0]) + 1 if len(stops) else len(tokens)
        version = self.versions[-1] if self.versions else ""
        finish = STOP if len(stops) else LENGTH
        return Segment(tokens[:size].astype(np.int32), logprobs[:size].astype(np.float32), finish, version)

    async def publish(self, version: str) -> None:
        """Name the policy of the segments to come."""
        self.versions.append(version)

    async def close(self) -> None:
        """Nothing is open."""

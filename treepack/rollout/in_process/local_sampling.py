"""Choose the next tokens inside transformers' continuous batching, from uniform numbers that each request brings.

    logits [R, V] --temperature, top_k, top_p--> log-probabilities --uniform number of each request--> tokens [R]

The manager of transformers draws from one generator for the whole batch, so its tokens depend on the other requests.
Here every continuation has separate uniform numbers, one for each token, and takes the token at that quantile:

    probabilities [0.2, 0.5, 0.3] -> cumulative [0.2, 0.7, 1.0], number 0.65 -> token 1

The manager only gets logits with a single finite entry for each request, whose maximum it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList

from treepack.rollout.options import Sampling


class SampledContinuation:
    """The state of one continuation while the manager samples it.

    `num_computed` counts the tokens of the prompt that went through the model, so the others came from the cache.
    `at_first_token` is called in the manager's thread while the keys of the whole prompt are being computed.
    """

    def __init__(self, *, seed: int, number: int, max_tokens: int, at_first_token: Callable[[], None] | None) -> None:
        self.uniform = np.random.default_rng([seed, number]).random(max_tokens).tolist()
        self.at_first_token = at_first_token
        self.logprobs: list[float] = []
        self.num_computed = 0

    def scheduled(self, num_tokens: int, *, ends_prompt: bool) -> None:
        """Note that the next forward pass has `num_tokens` tokens of this continuation."""
        if not self.logprobs:
            self.num_computed += num_tokens
        if ends_prompt and self.at_first_token is not None:
            start, self.at_first_token = self.at_first_token, None
            start()


class TokenChoice(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]  # transformers has no types
    """The list of logits processors of a manager, replaced by the choice of the tokens itself.

    `continuations` has the requests by their ids. The event loop adds and removes entries while the manager's thread
    reads them; single operations on a dict are safe.
    """

    def __init__(self, sampling: Sampling) -> None:
        super().__init__(LogitsProcessorList([]))
        # The manager calls the list only if this is set.
        self.do_processing = True
        self.continuations: dict[str, SampledContinuation] = {}
        self._rows: list[SampledContinuation | None] = []
        self._cuts = LogitsProcessorList([])
        if sampling.temperature != 1:
            self._cuts.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            self._cuts.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._cuts.append(TopPLogitsWarper(sampling.top_p))

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        """Note the requests of the next forward pass; each request with a new token has one row of logits, in order."""
        self._rows = []
        for request in requests_in_batch:
            continuation = self.continuations.get(request.state.request_id)
            if continuation is not None:
                continuation.scheduled(request.query_length, ends_prompt=request.has_new_token)
            if request.has_new_token:
                self._rows.append(continuation)
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        """Return logits [R, V] that are 0 at the chosen token of each row and -inf elsewhere.

        Rows after the requests that were noted are padding and stay as they are.
        """
        num_rows = len(self._rows)
        if not num_rows:
            return scores
        logits = self._cuts(input_ids, scores[:num_rows].float())
        logprobs = logits.log_softmax(-1)
        # A removed request still has its row in this forward pass; any number does.
        uniform = [0.5 if row is None else row.uniform[len(row.logprobs)] for row in self._rows]
        tokens = quantile_tokens(logprobs, torch.tensor(uniform, dtype=torch.float64).to(logprobs.device))
        chosen = logprobs.gather(1, tokens[:, None]).squeeze(1).tolist()
        for row, logprob in zip(self._rows, chosen, strict=True):
            if row is not None:
                row.logprobs.append(logprob)
        only = torch.full_like(scores, -torch.inf)
        only[:num_rows].scatter_(1, tokens[:, None], 0.0)
        only[num_rows:] = scores[num_rows:]
        return only


def quantile_tokens(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Return the token at the quantile `uniform` of each row, int64 [R].

    Args:
        logprobs: float32 [R, V]; -inf for tokens that cannot be chosen.
        uniform: float64 [R], in [0, 1).
    """
    # float64, because in float32 the sums near 1 are multiples of 6e-8, more than most tokens' probabilities.
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # The sums end at 1 up to rounding. The first sum above the number belongs to a token of positive probability.
    targets = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp_(max=logprobs.shape[1] - 1)

"""The teacher's distribution at each of some tokens, from which the losses of distillation compute.

    TeacherLaw of n tokens --cut, select--> of some of them --logprobs--> [n, K] of its ids, or [n, V] of all words

A law depends on the path to a token alone, so a shared token has one for all trajectories through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

# Logits [n, V] of a teacher's states [n, D], by its output layer.
StateLogits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TeacherLaw:
    """The teacher's distributions at n tokens: log-probabilities of its likeliest words, or states.

    Attributes:
        values: float [n, K], log-probabilities of `ids`, -inf in unused places; or states [n, D] for `logits`.
        ids: int64 [n, K], distinct words, and any in unused places. None for states.
        logits: the teacher's output layer, for states.
    """

    values: Tensor
    ids: Tensor | None = None
    logits: StateLogits | None = None

    def __len__(self) -> int:
        return len(self.values)

    def map(self, change: Callable[[Tensor], Tensor]) -> TeacherLaw:
        """Return the law with its tensors changed, such as moved to a device."""
        return replace(self, values=change(self.values), ids=None if self.ids is None else change(self.ids))

    def select(self, places: Tensor) -> TeacherLaw:
        """Return the laws at `places`, int64 on any device."""
        return self.map(lambda each: each.index_select(0, places.to(each.device)))

    def cut(self, span: slice) -> TeacherLaw:
        """Return the laws of a span."""
        return self.map(lambda each: each[span])

    def logprobs(self, temperature: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the log-probabilities [n, K] of `ids`, or [n, V] of all words at `temperature` [n], in `dtype`.

        Those of `ids` are stored at the temperature at which they were computed.
        """
        if self.logits is None:
            return self.values.to(dtype)
        logits = self.logits(self.values).to(dtype)
        return (logits if temperature is None else logits / temperature.to(dtype)[:, None]).log_softmax(-1)


def concatenate_laws(laws: Sequence[TeacherLaw]) -> TeacherLaw:
    """Return the laws of several rows as one; a row with fewer words gets unused places."""
    width = max(law.values.shape[1] for law in laws)
    values = torch.cat([pad(law.values, (0, width - law.values.shape[1]), value=-torch.inf) for law in laws])
    ids = [pad(law.ids, (0, width - law.ids.shape[1])) for law in laws if law.ids is not None]
    return replace(laws[0], values=values, ids=torch.cat(ids) if ids else None)

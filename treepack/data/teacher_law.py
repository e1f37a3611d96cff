"""The teacher's distribution at each of some tokens, from which the losses of distillation compute.

    TeacherLaw of n tokens --[rows]--> of some of them --logprobs--> [n, K] of its ids, or [n, V] of all words

A law depends on the path to a token alone, so a shared token has one for all trajectories through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from treepack.ragged import RaggedArray

# Logits [n, V] of a teacher's states [n, D], by its output layer.
_StateLogits = Callable[[Tensor], Tensor]


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
    logits: _StateLogits | None = None

    @classmethod
    def of(cls, ids: RaggedArray, logprobs: RaggedArray) -> TeacherLaw:
        """Return the laws of lists of words and their log-probabilities, of equal lengths."""
        # Lists of 2 and 1 words to a width of 2: places 0 1 and 0.
        width = int(ids.sizes.max(initial=1))
        used = np.arange(width) < ids.sizes[:, None]
        values, words = np.full(used.shape, -np.inf, logprobs.flat.dtype), np.zeros(used.shape, np.int64)
        values[used], words[used] = logprobs.flat, ids.flat
        return cls(torch.from_numpy(values), torch.from_numpy(words))

    def __len__(self) -> int:
        return len(self.values)

    def map(self, change: Callable[[Tensor], Tensor]) -> TeacherLaw:
        """Return the law with its tensors changed, such as moved to a device."""
        return replace(self, values=change(self.values), ids=None if self.ids is None else change(self.ids))

    def __getitem__(self, rows: slice | Tensor) -> TeacherLaw:
        """Return the laws of a slice, or of indices on any device."""
        return self.map(lambda each: each[rows if isinstance(rows, slice) else rows.to(each.device)])

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

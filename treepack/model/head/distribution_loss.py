"""Divergences of a student's law from a teacher's at the targets of a chunk, and their gradients by the logits.

    x [m, V], TeacherLaw of the chunk's targets --chunk_divergences--> [n]     --divergence_gradients--> [m, V]
    states [T, D], targets              --top_words--> the K likeliest words and their log-probabilities [n, K]

The logits of a chunk are in memory already; a block of its targets at a time is compared with the teacher, so the
comparison needs a few times BLOCK x V numbers beside them. With z the tempered logits, p the student's law, a the
slopes of `distillation.divergence`, A their sum and r the bucket of the rest:

    dD/dz_v = a_v - p_v A   for the teacher's words        p_v (a_r / p_r - A)   for the others
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from treepack.data.teacher_law import TeacherLaw
from treepack.data.transfers import sent
from treepack.model.head.head_chunks import ChunkTargets
from treepack.model.head.logit_map import LogitMap, OutputLayer
from treepack.objectives.distillation import divergence, log_rest

BLOCK = 256  # targets that are compared at a time: 155 MB in float32 with 151,936 words


@dataclass(frozen=True)
class TeacherTargets:
    """The teacher's laws at the targets of each chunk, and the divergence that is computed from them."""

    laws: Sequence[TeacherLaw]
    beta: float


def chunk_divergences(
    x: Tensor, targets: ChunkTargets, logit_map: LogitMap, teacher: tuple[TeacherLaw, float]
) -> Tensor:
    """Return the divergence at each target of a chunk [n], float64 for float64 logits, else float32.

    Laws are over the whole vocabulary, even if the targets have kept sets.

    Args:
        x: [m, V], as in `token_statistics`.
        targets: the targets.
        logit_map: the model's last step.
        teacher: the laws of the targets, and beta.
    """
    law, beta = teacher
    found = [_compare(_Block.of(x, part, logit_map), law[span], beta).value for span, part in _blocks(targets)]
    return torch.cat(found)


def divergence_gradients(
    x: Tensor,
    targets: ChunkTargets,
    logit_map: LogitMap,
    slopes: Tensor,
    teacher: tuple[TeacherLaw, float],
) -> Tensor:
    """Return the derivative of a loss by the output layer's result `x`, [m, V] in the dtype of the divergences.

    `slopes` [n] are the derivatives of the loss by the divergences; the other arguments are as in `chunk_divergences`.
    """
    law, beta = teacher
    result = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for span, part in _blocks(targets):
        block = _Block.of(x, part, logit_map)
        found = _compare(block, law[span], beta)
        grad = found.gradient().mul_(slopes[span, None])
        if part.temperature is not None:
            grad.div_(part.temperature.to(grad.dtype)[:, None])
        if logit_map != LogitMap():
            untempered = block.z if part.temperature is None else block.z * part.temperature.to(grad.dtype)[:, None]
            grad.mul_(logit_map.slope(untempered))
        result.index_add_(0, part.rows, grad)
    return result


def _blocks(targets: ChunkTargets) -> Iterator[tuple[slice, ChunkTargets]]:
    """Yield spans of the targets, and the targets of each; `rows` still are places in the chunk's states."""
    for begin in range(0, len(targets.labels), BLOCK):
        span = slice(begin, begin + BLOCK)
        temperature = None if targets.temperature is None else targets.temperature[span]
        yield span, replace(targets, rows=targets.rows[span], labels=targets.labels[span], temperature=temperature)


@dataclass(frozen=True)
class _Block:
    """Tempered logits z [n, V] of some targets, log sum exp of them [n], and their temperature [n]."""

    z: Tensor
    totals: Tensor
    temperature: Tensor | None

    @classmethod
    def of(cls, x: Tensor, targets: ChunkTargets, logit_map: LogitMap) -> _Block:
        chosen = x.index_select(0, targets.rows)
        z = logit_map(chosen if x.dtype == torch.float64 else chosen.float())
        divisor = targets.temperature
        z = z if divisor is None else z / divisor.to(z.dtype)[:, None]
        return cls(z, z.logsumexp(-1), divisor)


@dataclass(frozen=True)
class _Comparison:
    """The divergences [n] of a block, and their slopes by the student's outcomes."""

    value: Tensor
    slopes: Tensor  # [n, V], or [n, K] of the teacher's words
    block: _Block
    ids: Tensor | None = None
    rest: Tensor | None = None  # [n, V], tempered logits of all but the teacher's words
    rest_total: Tensor | None = None  # [n]
    rest_slope: Tensor | None = None  # [n]

    def gradient(self) -> Tensor:
        """Return the derivatives of the divergences by the tempered logits, [n, V]."""
        p = (self.block.z - self.block.totals[:, None]).exp_()
        total = self.slopes.sum(-1)
        if self.ids is None:
            return p.mul_(-total[:, None]).add_(self.slopes)
        assert self.rest is not None and self.rest_total is not None and self.rest_slope is not None  # noqa: PT018
        p.mul_(-(total + self.rest_slope)[:, None])
        # p_v / p_r of the other words; a rest without words has no slope
        share = (self.rest - self.rest_total[:, None]).exp_().nan_to_num_(nan=0.0)
        return p.addcmul_(share, self.rest_slope[:, None]).scatter_add_(-1, self.ids, self.slopes)


def _compare(block: _Block, law: TeacherLaw, beta: float) -> _Comparison:
    z, totals = block.z, block.totals
    teacher = law.logprobs(block.temperature, z.dtype)
    if law.ids is None:
        value, slopes = divergence(z - totals[:, None], teacher, beta)
        return _Comparison(value, slopes, block)
    # Unused places, and words that only the teacher's vocabulary has, are words of a column of their own.
    words = z.shape[1]
    teacher = teacher.masked_fill(law.ids >= words, -torch.inf)
    ids = law.ids.masked_fill(teacher == -torch.inf, words)
    outside = pad(z, (0, 1), value=-torch.inf)
    student = outside.gather(-1, ids) - totals[:, None]
    rest = outside.scatter_(-1, ids, -torch.inf)[:, :words]
    rest_total = rest.logsumexp(-1)
    # A teacher's top K that is the whole vocabulary has no rest.
    rest_teacher = torch.where(rest_total > -torch.inf, log_rest(teacher, law.values.dtype), -torch.inf)
    # [n, K + 1]: the words of the teacher, then the rest
    value, slopes = divergence(
        torch.cat([student, (rest_total - totals)[:, None]], -1), torch.cat([teacher, rest_teacher[:, None]], -1), beta
    )
    # Unused places have the slope 0, wherever they are added.
    return _Comparison(value, slopes[:, :-1], block, ids.clamp(max=words - 1), rest, rest_total, slopes[:, -1])


@torch.no_grad()
def top_words(
    hidden: Tensor,
    layer: OutputLayer,
    targets: tuple[Tensor, Tensor, Tensor],
    top_k: int,
    *,
    temperature: Tensor | float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return the `top_k` likeliest words at each target, and their log-probabilities, [n, K], the likeliest first.

    Arguments are as in `token_loss.tree_logprobs`; K is at most the vocabulary.
    """
    tokens, _, parent = targets
    width = min(top_k, len(layer.weight))
    ids, logprobs = [], []
    for part in torch.split(torch.arange(len(tokens), device=tokens.device), chunk):
        states = hidden.index_select(0, sent(parent.index_select(0, tokens[part]), hidden.device))
        logits = layer.logits(states)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        divisor = temperature[sent(part, temperature.device)] if isinstance(temperature, Tensor) else None
        logits = logits / (temperature if divisor is None else sent(divisor, hidden.device).to(logits)[:, None])
        values, words = logits.topk(width, -1)
        ids.append(words)
        logprobs.append(values - logits.logsumexp(-1, keepdim=True))
    return torch.cat(ids), torch.cat(logprobs)

"""`token_statistics` in Triton: the logits are read once in each direction and are never stored in float32.

    forward     one program per row goes through the words in blocks    log p[label], lse, entropy    float32 [n]
    backward    one program per row and block of words                  gradient of x                 [n, V], as x

Running values of a row, with m the largest z so far and d = z - m <= 0:

    total = sum exp(d)      weighted = sum d exp(d)      lse = m + log(total)      H = log(total) - weighted / total

Both parts of H are small where the distribution is nearly one word; lse - sum p z would lose its digits there. When m
grows by s, total becomes exp(-s) total, and weighted becomes exp(-s) (weighted - s total).

In: x [n, V] in bfloat16, float16 or float32, stride 1 in the last dimension. Sums are in float32 and in one order, so
two runs agree in every bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from treepack.model.token_statistics import LogitMap

FORWARD_BLOCK = 4096  # words per step of a row
BACKWARD_BLOCK = 4096  # words per program
NUM_WARPS = 8


@triton.jit
def _tempered_logits(x, temperature, scale, cap, HAS_CAP: tl.constexpr):
    # x [BLOCK] -> z [BLOCK]. tanh(u) = 1 - 2 / (exp(2 u) + 1) is right for u = -inf and inf too. Near 0 it would lose
    # digits, and the first terms of the series u - u^3 / 3 + 2 u^5 / 15 - ... are exact to 1e-8.
    y = x * scale
    if HAS_CAP:
        u = y / cap
        square = u * u
        series = u * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
        y = cap * tl.where(square < 0.01, series, 1 - 2 / (tl.exp(2 * u) + 1))
    return y / temperature


@triton.jit
def _forward_kernel(
    x,
    labels,
    temperatures,
    logprobs,
    totals,
    entropies,
    num_words,
    stride,
    scale,
    cap,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    p_row = x + i_row * stride
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperatures + i_row)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for start in range(0, num_words, BLOCK):
        # words [BLOCK], their tempered logits [BLOCK]
        o_word = start + tl.arange(0, BLOCK)
        m_word = o_word < num_words
        b_x = tl.load(p_row + o_word, mask=m_word, other=0.0).to(tl.float32)
        b_z = tl.where(m_word, _tempered_logits(b_x, temperature, scale, cap, HAS_CAP), float("-inf"))
        before = largest
        largest = tl.maximum(before, tl.max(b_z, 0))
        # Logits of -inf are allowed: a word that cannot be chosen. A row that begins with them has no maximum yet.
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        growth = tl.where(before == float("-inf"), 0.0, shift - before)
        b_d = b_z - shift
        b_e = tl.exp(b_d)
        factor = tl.exp(-growth)
        weighted = factor * (weighted - growth * total) + tl.sum(tl.where(b_e > 0, b_d * b_e, 0.0), 0)
        total = factor * total + tl.sum(b_e, 0)
    label = tl.load(labels + i_row)
    m_label = (label >= 0) & (label < num_words)  # another label gets NaN
    b_label = tl.load(p_row + label, mask=m_label, other=float("nan")).to(tl.float32)
    lse = largest + tl.log(total)
    tl.store(logprobs + i_row, _tempered_logits(b_label, temperature, scale, cap, HAS_CAP) - lse)
    tl.store(totals + i_row, lse)
    tl.store(entropies + i_row, tl.log(total) - weighted / total)


@triton.jit
def _backward_kernel(
    x,
    labels,
    temperatures,
    totals,
    entropies,
    logprob_grads,
    entropy_grads,
    x_grad,
    num_words,
    stride,
    scale,
    cap,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_LOGPROB_GRAD: tl.constexpr,
    HAS_ENTROPY_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_word = o_word < num_words
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperatures + i_row)
    b_x = tl.load(x + i_row * stride + o_word, mask=m_word, other=0.0).to(tl.float32)
    b_z = _tempered_logits(b_x, temperature, scale, cap, HAS_CAP)
    b_log = b_z - tl.load(totals + i_row)
    b_p = tl.exp(b_log)
    # [BLOCK], the gradient by z
    b_grad = tl.zeros([BLOCK], tl.float32)
    if HAS_LOGPROB_GRAD:
        g = tl.load(logprob_grads + i_row)
        b_grad += g * (tl.where(o_word == tl.load(labels + i_row), 1.0, 0.0) - b_p)
    if HAS_ENTROPY_GRAD:
        g = tl.load(entropy_grads + i_row)
        b_grad -= g * b_p * (tl.where(b_p > 0, b_log, 0.0) + tl.load(entropies + i_row))
    b_grad = b_grad * scale / temperature
    if HAS_CAP:
        b_tanh = b_z * temperature / cap
        b_grad = b_grad * (1 - b_tanh * b_tanh)
    tl.store(x_grad + i_row * num_words + o_word, b_grad.to(x_grad.dtype.element_ty), mask=m_word)


class FusedStatistics(torch.autograd.Function):
    """`token_statistics.TokenStatistics` in two kernels; the only [n, V] tensor that it saves is x itself."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, labels: Tensor, temperature: Tensor | None, logit_map: LogitMap, with_entropies: bool
    ) -> tuple[Tensor, Tensor]:
        num_rows, num_words = x.shape
        assert x.stride(1) == 1
        temperatures = None if temperature is None else temperature.float().contiguous()
        # Not initialised: the kernel writes every element.
        logprobs, totals, entropies = (x.new_empty(num_rows, dtype=torch.float32) for _ in range(3))
        _forward_kernel[(num_rows,)](
            x,
            labels,
            totals if temperatures is None else temperatures,
            logprobs,
            totals,
            entropies,
            num_words,
            x.stride(0),
            float(logit_map.scale),
            float(logit_map.cap or 0),
            HAS_TEMPERATURE=temperatures is not None,
            HAS_CAP=logit_map.cap is not None,
            BLOCK=min(FORWARD_BLOCK, triton.next_power_of_2(num_words)),
            num_warps=NUM_WARPS,
        )
        ctx.save_for_backward(x, labels, temperatures, totals, entropies)
        ctx.logit_map = logit_map
        ctx.set_materialize_grads(False)
        if with_entropies:
            return logprobs, entropies
        unwanted = torch.full_like(entropies, torch.nan)
        ctx.mark_non_differentiable(unwanted)
        return logprobs, unwanted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        x, labels, temperatures, totals, entropies = ctx.saved_tensors
        logprob_grad, entropy_grad = (None if grad is None else grad.float().contiguous() for grad in grads)
        if logprob_grad is None and entropy_grad is None:
            return None, None, None, None, None
        num_rows, num_words = x.shape
        block = min(BACKWARD_BLOCK, triton.next_power_of_2(num_words))
        result = torch.empty((num_rows, num_words), dtype=x.dtype, device=x.device)
        _backward_kernel[(num_rows, triton.cdiv(num_words, block))](
            x,
            labels,
            totals if temperatures is None else temperatures,
            totals,
            entropies,
            totals if logprob_grad is None else logprob_grad,
            totals if entropy_grad is None else entropy_grad,
            result,
            num_words,
            x.stride(0),
            float(ctx.logit_map.scale),
            float(ctx.logit_map.cap or 0),
            HAS_TEMPERATURE=temperatures is not None,
            HAS_CAP=ctx.logit_map.cap is not None,
            HAS_LOGPROB_GRAD=logprob_grad is not None,
            HAS_ENTROPY_GRAD=entropy_grad is not None,
            BLOCK=block,
            num_warps=NUM_WARPS,
        )
        return result, None, None, None, None

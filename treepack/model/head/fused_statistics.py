"""`token_statistics` in Triton: the logits are read once in each direction and are never stored in float32.

    statistics  one program per target goes through the words in blocks    log p[label], lse, entropy    float32 [n]
    gradients   one program per state and block of words                   the gradients of x, in its place    [m, V]

A target with a kept set reads the words of its set alone. The gradient kernel leaves such targets out, and writes zeros
without reading if a state has no others. Before it, one program per target with a set sums the gradients of all targets
of its state at the words of its set, which torch writes to x after it. Two sets of one state that share a word give the
same number there.

Running values of a target, with m the largest z so far and d = z - m <= 0:

    total = sum exp(d)      weighted = sum d exp(d)      lse = m + log(total)      H = log(total) - weighted / total

Both parts of H are small if the distribution is nearly one word; lse - sum p z would lose its digits then. When m
grows by s, total becomes exp(-s) total, and weighted becomes exp(-s) (weighted - s total).

In: x [m, V] in bfloat16, float16 or float32, stride 1 in the last dimension. Sums are in float32 and in one order, so
two runs agree in every bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from treepack.model.head.head_chunks import ChunkTargets
from treepack.model.head.logit_map import LogitMap, TargetSlopes, TargetStatistics

STATISTICS_BLOCK = 4096  # words per step of a target
GRADIENT_BLOCK = 4096  # words per program
KEPT_BLOCK = 1024  # ids of a set per step of a target
_NUM_WARPS = 8


@triton.jit
def _mapped_logits(x, scale, cap, HAS_CAP: tl.constexpr):
    # x [BLOCK] -> the model's logits y [BLOCK]. tanh(u) = 1 - 2 / (exp(2 u) + 1) is right for u = -inf and inf too.
    # Near 0 it would lose digits, and the first terms of the series u - u^3 / 3 + 2 u^5 / 15 - ... are exact to 1e-8.
    y = x * scale
    if HAS_CAP:
        u = y / cap
        square = u * u
        series = u * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
        y = cap * tl.where(square < 0.01, series, 1 - 2 / (tl.exp(2 * u) + 1))
    return y


@triton.jit
def _add_block(largest, total, weighted, b_z):
    # running values of a target, and more of its tempered logits [BLOCK] -> running values
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
    return largest, total, weighted


@triton.jit
def _statistics_kernel(
    x,
    rows,
    labels,
    temperatures,
    kept,
    offsets,
    logprobs,
    totals,
    entropies,
    num_words,
    stride,
    scale,
    cap,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
):
    i_target = tl.program_id(0)
    # rows [0 0 1]: targets 0 and 1 read the logits of state 0
    p_row = x + tl.load(rows + i_target).to(tl.int64) * stride
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperatures + i_target)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    num_read = num_words
    if HAS_KEPT:
        p_kept = kept + tl.load(offsets + i_target)
        num_kept = tl.load(offsets + i_target + 1) - tl.load(offsets + i_target)
        num_read = tl.where(num_kept > 0, 0, num_words)
        for start in range(0, num_kept, KEPT_BLOCK):
            # words of the set [KEPT_BLOCK], their tempered logits [KEPT_BLOCK]
            o_kept = start + tl.arange(0, KEPT_BLOCK)
            m_kept = o_kept < num_kept
            b_word = tl.load(p_kept + o_kept, mask=m_kept, other=0)
            b_x = tl.load(p_row + b_word, mask=m_kept, other=0.0).to(tl.float32)
            b_z = tl.where(m_kept, _mapped_logits(b_x, scale, cap, HAS_CAP) / temperature, float("-inf"))
            largest, total, weighted = _add_block(largest, total, weighted, b_z)
    for start in range(0, num_read, BLOCK):
        # words [BLOCK], their tempered logits [BLOCK]
        o_word = start + tl.arange(0, BLOCK)
        m_word = o_word < num_words
        b_x = tl.load(p_row + o_word, mask=m_word, other=0.0).to(tl.float32)
        b_z = tl.where(m_word, _mapped_logits(b_x, scale, cap, HAS_CAP) / temperature, float("-inf"))
        largest, total, weighted = _add_block(largest, total, weighted, b_z)
    label = tl.load(labels + i_target)
    m_label = (label >= 0) & (label < num_words)  # another label gets NaN
    b_label = tl.load(p_row + label, mask=m_label, other=float("nan")).to(tl.float32)
    lse = largest + tl.log(total)
    tl.store(logprobs + i_target, _mapped_logits(b_label, scale, cap, HAS_CAP) / temperature - lse)
    tl.store(totals + i_target, lse)
    tl.store(entropies + i_target, tl.log(total) - weighted / total)


@triton.jit
def _target_gradient(
    b_y,
    b_word,
    i_target,
    labels,
    temperatures,
    totals,
    entropies,
    logprob_slopes,
    entropy_slopes,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_LOGPROB_SLOPE: tl.constexpr,
    HAS_ENTROPY_SLOPE: tl.constexpr,
):
    # logits [BLOCK] of words [BLOCK] -> the gradient of a target by these logits [BLOCK]
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperatures + i_target)
    # [BLOCK]: log p, p
    b_log = b_y / temperature - tl.load(totals + i_target)
    b_p = tl.exp(b_log)
    b_own = tl.zeros_like(b_p)
    if HAS_LOGPROB_SLOPE:
        g = tl.load(logprob_slopes + i_target)
        b_own += g * (tl.where(b_word == tl.load(labels + i_target), 1.0, 0.0) - b_p)
    if HAS_ENTROPY_SLOPE:
        g = tl.load(entropy_slopes + i_target)
        b_own -= g * b_p * (tl.where(b_p > 0, b_log, 0.0) + tl.load(entropies + i_target))
    return b_own / temperature


@triton.jit
def _by_result(b_grad, b_y, scale, cap, HAS_CAP: tl.constexpr):
    # gradient by the model's logits y [BLOCK] -> by the output layer's result x [BLOCK]
    b_grad = b_grad * scale
    if HAS_CAP:
        b_tanh = b_y / cap
        b_grad = b_grad * (1 - b_tanh * b_tanh)
    return b_grad


@triton.jit
def _num_without_set(offsets, begin, end):
    number = tl.full((), 0, tl.int32)
    for i_target in range(begin, end):
        number += (tl.load(offsets + i_target + 1) == tl.load(offsets + i_target)).to(tl.int32)
    return number


@triton.jit
def _contains(p_set, num_kept, b_word, num_steps):
    # ascending set, words [BLOCK] -> True for words of the set [BLOCK]; a binary search for the first id >= word
    b_low = b_word.to(tl.int64) * 0
    b_high = b_low + num_kept
    for _ in range(num_steps):
        b_middle = (b_low + b_high) // 2
        m_open = b_low < b_high
        b_id = tl.load(p_set + b_middle, mask=m_open, other=0)
        b_low = tl.where(m_open & (b_id < b_word), b_middle + 1, b_low)
        b_high = tl.where(m_open & (b_id >= b_word), b_middle, b_high)
    m_inside = b_low < num_kept
    return m_inside & (tl.load(p_set + b_low, mask=m_inside, other=-1) == b_word)


@triton.jit
def _kept_gradient_kernel(
    x,
    rows,
    first,
    labels,
    temperatures,
    kept,
    offsets,
    totals,
    entropies,
    logprob_slopes,
    entropy_slopes,
    gradients,
    num_steps,
    stride,
    scale,
    cap,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_LOGPROB_SLOPE: tl.constexpr,
    HAS_ENTROPY_SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_target = tl.program_id(0)
    i_state = tl.load(rows + i_target)
    p_row = x + i_state.to(tl.int64) * stride
    o_set = tl.load(offsets + i_target)
    num_kept = tl.load(offsets + i_target + 1) - o_set
    for start in range(0, num_kept, BLOCK):
        o_kept = start + tl.arange(0, BLOCK)
        m_kept = o_kept < num_kept
        # words of the set [BLOCK], their logits [BLOCK]
        b_word = tl.load(kept + o_set + o_kept, mask=m_kept, other=0)
        b_x = tl.load(p_row + b_word, mask=m_kept, other=0.0).to(tl.float32)
        b_y = _mapped_logits(b_x, scale, cap, HAS_CAP)
        b_grad = tl.zeros([BLOCK], tl.float32)
        # All targets of the state, in their order, so that programs that share a word compute the same sum.
        for i_other in range(tl.load(first + i_state), tl.load(first + i_state + 1)):
            o_other = tl.load(offsets + i_other)
            num_other = tl.load(offsets + i_other + 1) - o_other
            m_own = m_kept
            if (i_other != i_target) & (num_other > 0):
                m_own = m_kept & _contains(kept + o_other, num_other, b_word, num_steps)
            b_own = _target_gradient(
                b_y,
                b_word,
                i_other,
                labels,
                temperatures,
                totals,
                entropies,
                logprob_slopes,
                entropy_slopes,
                HAS_TEMPERATURE,
                HAS_LOGPROB_SLOPE,
                HAS_ENTROPY_SLOPE,
            )
            b_grad += tl.where(m_own, b_own, 0.0)
        tl.store(gradients + o_set + o_kept, _by_result(b_grad, b_y, scale, cap, HAS_CAP), mask=m_kept)


@triton.jit
def _gradient_kernel(
    x,
    first,
    labels,
    temperatures,
    offsets,
    totals,
    entropies,
    logprob_slopes,
    entropy_slopes,
    num_words,
    stride,
    scale,
    cap,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_LOGPROB_SLOPE: tl.constexpr,
    HAS_ENTROPY_SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_state = tl.program_id(0)
    o_word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_word = o_word < num_words
    p_x = x + i_state.to(tl.int64) * stride + o_word
    begin, end = tl.load(first + i_state), tl.load(first + i_state + 1)
    m_read = m_word
    if HAS_KEPT:
        m_read = o_word < tl.where(_num_without_set(offsets, begin, end) > 0, num_words, 0)
    b_x = tl.load(p_x, mask=m_read, other=0.0).to(tl.float32)
    b_y = _mapped_logits(b_x, scale, cap, HAS_CAP)
    # [BLOCK], the gradient by y
    b_grad = tl.zeros([BLOCK], tl.float32)
    for i_target in range(begin, end):
        b_own = _target_gradient(
            b_y,
            o_word,
            i_target,
            labels,
            temperatures,
            totals,
            entropies,
            logprob_slopes,
            entropy_slopes,
            HAS_TEMPERATURE,
            HAS_LOGPROB_SLOPE,
            HAS_ENTROPY_SLOPE,
        )
        if HAS_KEPT:
            has_set = tl.load(offsets + i_target + 1) > tl.load(offsets + i_target)
            b_own = tl.where(has_set, 0.0, b_own)
        b_grad += b_own
    tl.store(p_x, _by_result(b_grad, b_y, scale, cap, HAS_CAP).to(x.dtype.element_ty), mask=m_word)


def fused_statistics(x: Tensor, targets: ChunkTargets, logit_map: LogitMap) -> TargetStatistics:
    """Compute `token_statistics.token_statistics` in one kernel; entropies cost nothing and are always there."""
    assert x.stride(1) == 1
    num_targets, num_words = len(targets.labels), x.shape[1]
    temperatures, kept = _floats(targets.temperature), targets.kept
    # Not initialised: the kernel writes every element.
    logprobs, totals, entropies = (x.new_empty(num_targets, dtype=torch.float32) for _ in range(3))
    _statistics_kernel[(num_targets,)](
        x,
        targets.rows,
        targets.labels,
        totals if temperatures is None else temperatures,
        targets.labels if kept is None else kept.values,
        targets.labels if kept is None else kept.offsets,
        logprobs,
        totals,
        entropies,
        num_words,
        x.stride(0),
        float(logit_map.scale),
        float(logit_map.cap or 0),
        HAS_TEMPERATURE=temperatures is not None,
        HAS_KEPT=kept is not None,
        HAS_CAP=logit_map.cap is not None,
        BLOCK=min(STATISTICS_BLOCK, triton.next_power_of_2(num_words)),
        KEPT_BLOCK=KEPT_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return TargetStatistics(logprobs, totals, entropies)


def fused_gradients(
    x: Tensor, targets: ChunkTargets, logit_map: LogitMap, statistics: TargetStatistics, slopes: TargetSlopes
) -> None:
    """Compute `token_statistics.turn_into_gradients` in one kernel, and in a small one if targets have sets."""
    assert x.stride(1) == 1
    num_states, num_words = x.shape
    block = min(GRADIENT_BLOCK, triton.next_power_of_2(num_words))
    temperatures, logprobs, entropies = map(_floats, (targets.temperature, slopes.logprobs, slopes.entropies))
    totals, kept = statistics.totals, targets.kept
    of_targets = (
        totals,
        statistics.entropies,
        totals if logprobs is None else logprobs,
        totals if entropies is None else entropies,
    )
    of_states = targets.first, targets.labels, totals if temperatures is None else temperatures
    change = x.stride(0), float(logit_map.scale), float(logit_map.cap or 0)
    switches: dict[str, Any] = {
        "HAS_TEMPERATURE": temperatures is not None,
        "HAS_CAP": logit_map.cap is not None,
        "HAS_LOGPROB_SLOPE": logprobs is not None,
        "HAS_ENTROPY_SLOPE": entropies is not None,
    }
    if kept is not None:
        gradients = x.new_empty(len(kept.values), dtype=torch.float32)
        _kept_gradient_kernel[(len(targets.labels),)](
            x,
            targets.rows,
            *of_states,
            kept.values,
            kept.offsets,
            *of_targets,
            gradients,
            num_words.bit_length(),  # steps of a binary search
            *change,
            **switches,
            BLOCK=KEPT_BLOCK,
        )
    _gradient_kernel[(num_states, triton.cdiv(num_words, block))](
        x,
        *of_states,
        targets.first if kept is None else kept.offsets,
        *of_targets,
        num_words,
        *change,
        **switches,
        HAS_KEPT=kept is not None,
        BLOCK=block,
        num_warps=_NUM_WARPS,
    )
    if kept is not None:
        x.index_put_((targets.rows[kept.owners], kept.values), gradients.to(x.dtype))


def _floats(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.float().contiguous()

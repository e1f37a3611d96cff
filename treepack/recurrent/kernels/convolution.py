"""Short causal convolutions on trees in Triton: `recurrent.convolution` for bfloat16, float16 and float32.

    forward   x [N, C]                  --> out [N, C]
    weight    x, gradient of out        --> inner [N, C], the gradient before silu, and partial sums of the gradients of
                                            weight and bias
    distant   inner                     --> [E, C], the shares of the distant readers of each target (`ConvolutionTaps`)
    input     inner, distant            --> gradient of x [N, C]

A program computes tiles of tokens times channels. Tokens are gathered through `ConvolutionTaps.ancestors`; neighbours
in a tile read nearly the same tokens, so most of these loads hit the L1 cache. The forward keeps nothing but x.

Sums are in float32 and in one order, so two runs agree in every bit. `weights` is float32 [W, C]; row i belongs to tap
i, which reads the i-th ancestor. SIZES are W, C, and the row strides of x and of a gradient.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from treepack.attention.kernel_launch import KernelLaunch
from treepack.recurrent.convolution import ConvolutionTaps, check_activation

# A program is one warp, and a thread has 8 neighbouring channels of every token of a tile: 16 bytes in half precision.
# So sums over the tokens of a tile need no exchange between threads.
BLOCK_C = 256  # channels of a tile
BLOCK_T = 8  # tokens of a tile, which a program has all in registers; a part of them in `weight` and with many taps
PART = 128  # tokens of a program of `weight`, tile after tile: one partial sum
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _split_program(C: tl.constexpr, BLOCK_C: tl.constexpr):
    # Number of the tokens' block and number of the channels' block, which changes first
    blocks = tl.cdiv(C, BLOCK_C)
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks


@triton.jit
def _gather(x, source, o_c, m_c, STRIDE: tl.constexpr):
    # x[source], and 0 for sources of -1: [T], [C] -> float32 [T, C]
    p_x = x + source.to(tl.int64)[:, None] * STRIDE + o_c[None, :]
    return tl.load(p_x, mask=(source >= 0)[:, None] & m_c[None, :], other=0.0).to(tl.float32)


@triton.jit
def _sum_taps(x, weights, bias, ancestors, o_t, m_t, o_c, m_c, count, SIZES: tl.constexpr, HAS_BIAS: tl.constexpr):
    # Outputs of the tokens o_t before the activation: [T], [C] -> float32 [T, C]
    W: tl.constexpr = SIZES[0]
    C: tl.constexpr = SIZES[1]
    b_sum = tl.zeros((o_t.shape[0], o_c.shape[0]), dtype=tl.float32)
    if HAS_BIAS:
        b_sum += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    for i in tl.static_range(W):
        source = tl.load(ancestors + i * count + o_t, mask=m_t, other=-1)
        b_weight = tl.load(weights + i * C + o_c, mask=m_c, other=0.0)
        b_sum += _gather(x, source, o_c, m_c, SIZES[2]) * b_weight[None, :]
    return b_sum


@triton.jit(do_not_specialize=["count"])
def _convolution_kernel(
    x,
    weights,
    bias,
    ancestors,
    out,
    count,
    SIZES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    C: tl.constexpr = SIZES[1]
    i_t, i_c = _split_program(C, BLOCK_C)
    o_t, o_c = i_t * BLOCK_T + tl.arange(0, BLOCK_T), i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    m_t, m_c = o_t < count, o_c < C
    b_out = _sum_taps(x, weights, bias, ancestors, o_t, m_t, o_c, m_c, count, SIZES, HAS_BIAS)
    if SILU:
        b_out *= tl.sigmoid(b_out)
    p_out = out + o_t.to(tl.int64)[:, None] * C + o_c[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_t[:, None] & m_c[None, :])


@triton.jit(do_not_specialize=["count"])
def _convolution_weight_kernel(
    x,
    weights,
    bias,
    ancestors,
    do,
    inner,
    dweights,
    dbias,
    count,
    SIZES: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    W: tl.constexpr = SIZES[0]
    C: tl.constexpr = SIZES[1]
    i_part, i_c = _split_program(C, BLOCK_C)
    o_c, o_w = i_c * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_W)
    m_c = o_c < C
    b_dweights = tl.zeros((BLOCK_W, BLOCK_C), dtype=tl.float32)
    b_dbias = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for first in range(i_part * PART, tl.minimum(i_part * PART + PART, count), BLOCK_T):
        o_t = first + tl.arange(0, BLOCK_T)
        m_t = o_t < count
        b_do = _gather(do, tl.where(m_t, o_t, -1), o_c, m_c, SIZES[3])
        if SILU:
            b_sum = _sum_taps(x, weights, bias, ancestors, o_t, m_t, o_c, m_c, count, SIZES, HAS_BIAS)
            b_sigmoid = tl.sigmoid(b_sum)
            b_do *= b_sigmoid * (1 + b_sum * (1 - b_sigmoid))
            p_inner = inner + o_t.to(tl.int64)[:, None] * C + o_c[None, :]
            tl.store(p_inner, b_do, mask=m_t[:, None] & m_c[None, :])
        for i in tl.static_range(W):
            source = tl.load(ancestors + i * count + o_t, mask=m_t, other=-1)
            b_row = tl.sum(b_do * _gather(x, source, o_c, m_c, SIZES[2]), 0)
            b_dweights += tl.where(o_w[:, None] == i, b_row[None, :], 0.0)
        b_dbias += tl.sum(b_do, 0)
    p_dweights = dweights + (i_part.to(tl.int64) * W + o_w)[:, None] * C + o_c[None, :]
    tl.store(p_dweights, b_dweights, mask=(o_w < W)[:, None] & m_c[None, :])
    if HAS_BIAS:
        tl.store(dbias + i_part.to(tl.int64) * C + o_c, b_dbias, mask=m_c)


@triton.jit
def _convolution_distant_kernel(
    weights,
    inner,
    begins,
    readers,
    reader_taps,
    distant,
    SIZES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    C: tl.constexpr = SIZES[1]
    i_target, i_c = _split_program(C, BLOCK_C)
    o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    b_sum = tl.zeros((BLOCK_C,), dtype=tl.float32)
    end = tl.load(begins + i_target + 1)
    for first in range(tl.load(begins + i_target), end, BLOCK_T):
        o_f = first + tl.arange(0, BLOCK_T)
        reader = tl.load(readers + o_f, mask=o_f < end, other=-1)
        tap = tl.load(reader_taps + o_f, mask=o_f < end, other=0)
        # [T, C], summed over the readers
        b_sum += tl.sum(_gather(inner, reader, o_c, m_c, SIZES[3]) * _gather(weights, tap, o_c, m_c, C), 0)
    tl.store(distant + i_target.to(tl.int64) * C + o_c, b_sum, mask=m_c)


@triton.jit(do_not_specialize=["count"])
def _convolution_input_kernel(
    weights,
    ancestors,
    inner,
    number,
    distant,
    dx,
    count,
    SIZES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    W: tl.constexpr = SIZES[0]
    C: tl.constexpr = SIZES[1]
    i_t, i_c = _split_program(C, BLOCK_C)
    o_t, o_c = i_t * BLOCK_T + tl.arange(0, BLOCK_T), i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    m_t, m_c = o_t < count, o_c < C
    b_dx = _gather(distant, tl.load(number + o_t, mask=m_t, other=-1), o_c, m_c, C)
    for i in tl.static_range(W):
        # Token t + i is a near reader of t if t is its i-th ancestor.
        o_s = o_t + i
        is_near = tl.load(ancestors + i * count + o_s, mask=o_s < count, other=-1) == o_t
        b_weight = tl.load(weights + i * C + o_c, mask=m_c, other=0.0)
        b_dx += _gather(inner, tl.where(is_near, o_s, -1), o_c, m_c, SIZES[3]) * b_weight[None, :]
    p_dx = dx + o_t.to(tl.int64)[:, None] * C + o_c[None, :]
    tl.store(p_dx, b_dx.to(dx.dtype.element_ty), mask=m_t[:, None] & m_c[None, :])


class ConvolutionInputs(NamedTuple):
    """Operands of a convolution: x [N, C], weights float32 [W, C], bias [C] or None, silu or no activation, taps."""

    x: Tensor
    weights: Tensor
    bias: Tensor | None
    is_silu: bool
    taps: ConvolutionTaps


class ConvolutionGradients(NamedTuple):
    """Tensors of a backward with E targets and P = `partial_sums(N)`: the gradient of the output, and the results.

    do        [N, C]
    inner     [N, C], float32: the gradient before silu; without silu, it is `do`
    distant   float32 [E, C], sums over the distant readers of each target
    dx        [N, C]
    dweights  float32 [P, W, C], partial sums
    dbias     float32 [P, C], partial sums
    """

    do: Tensor
    inner: Tensor
    distant: Tensor
    dx: Tensor
    dweights: Tensor
    dbias: Tensor


def convolution_launch(inputs: ConvolutionInputs, out: Tensor) -> KernelLaunch:
    """Return the launch that writes the convolution to `out` [N, C]."""
    arguments, constants = _operands(inputs), _constants(inputs)
    constants |= {"HAS_BIAS": inputs.bias is not None, "SILU": inputs.is_silu}
    programs = triton.cdiv(len(out), constants["BLOCK_T"])
    return _launch(_convolution_kernel, programs, {**arguments, "out": out}, constants)


def weight_launch(inputs: ConvolutionInputs, gradients: ConvolutionGradients) -> KernelLaunch:
    """Return the launch that writes `dweights`, `dbias` and, with silu, `inner`."""
    constants = _constants(inputs, gradients.do) | {"HAS_BIAS": inputs.bias is not None, "SILU": inputs.is_silu}
    block = constants["BLOCK_T"] // 2
    constants |= {"BLOCK_W": triton.next_power_of_2(len(inputs.weights)), "BLOCK_T": block, "PART": PART}
    tensors = {name: getattr(gradients, name) for name in ("do", "inner", "dweights", "dbias")}
    return _launch(_convolution_weight_kernel, partial_sums(len(inputs.x)), {**_operands(inputs), **tensors}, constants)


def distant_launch(inputs: ConvolutionInputs, gradients: ConvolutionGradients) -> KernelLaunch:
    """Return the launch that reads `inner` and writes `distant`; there is at least one target."""
    taps = inputs.taps
    arguments = {
        "weights": inputs.weights,
        "inner": gradients.inner,
        "begins": taps.begins,
        "readers": taps.readers,
        "reader_taps": taps.reader_taps,
        "distant": gradients.distant,
    }
    return _launch(_convolution_distant_kernel, len(taps.targets), arguments, _constants(inputs, gradients.inner))


def input_launch(inputs: ConvolutionInputs, gradients: ConvolutionGradients) -> KernelLaunch:
    """Return the launch that reads `inner` and `distant` and writes `dx`."""
    arguments = {
        "weights": inputs.weights,
        "ancestors": inputs.taps.ancestors,
        "inner": gradients.inner,
        "number": inputs.taps.number,
        "distant": gradients.distant,
        "dx": gradients.dx,
        "count": len(inputs.x),
    }
    constants = _constants(inputs, gradients.inner)
    return _launch(_convolution_input_kernel, triton.cdiv(len(inputs.x), constants["BLOCK_T"]), arguments, constants)


def partial_sums(tokens: int) -> int:
    """Return the number of partial sums over `tokens` tokens."""
    return -(-tokens // PART)


def _operands(inputs: ConvolutionInputs) -> dict[str, Any]:
    x, weights, bias, _, taps = inputs
    # Without a bias, the kernel does not read it.
    return {
        "x": x,
        "weights": weights,
        "bias": weights if bias is None else bias,
        "ancestors": taps.ancestors,
        "count": len(x),
    }


def _constants(inputs: ConvolutionInputs, gradient: Tensor | None = None) -> dict[str, Any]:
    # Strides are constants, so that addresses are known to be multiples of 16 bytes.
    stride = 0 if gradient is None else gradient.stride(0)
    sizes = (len(inputs.weights), inputs.x.shape[1], inputs.x.stride(0), stride)
    # More than 4 taps would spill registers.
    return {"SIZES": sizes, "BLOCK_T": BLOCK_T if len(inputs.weights) <= 4 else BLOCK_T // 2, "BLOCK_C": BLOCK_C}


def _launch(kernel: Any, rows: int, arguments: dict[str, Any], constants: dict[str, Any]) -> KernelLaunch:
    """Return the launch with one program for each of `rows` and each block of channels."""
    programs = rows * triton.cdiv(constants["SIZES"][1], BLOCK_C)
    return KernelLaunch(kernel, programs, arguments, constants, {"num_warps": 1})


class _TreeConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_silu: bool, taps: ConvolutionTaps
    ) -> Tensor:
        x = _with_rows(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        with torch.cuda.device_of(x):
            if out.numel():
                convolution_launch(ConvolutionInputs(x, _by_taps(weight), bias, is_silu, taps), out).run()
        ctx.save_for_backward(x, weight, bias)
        ctx.is_silu, ctx.taps = is_silu, taps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        (count, channels), parts = x.shape, partial_sums(len(x))
        inputs = ConvolutionInputs(x, _by_taps(weight), bias, ctx.is_silu, ctx.taps)
        do, wide = _with_rows(gradients[0]), functools.partial(torch.empty, dtype=torch.float32, device=x.device)
        results = ConvolutionGradients(
            do=do,
            inner=wide((count, channels)) if ctx.is_silu else do,
            distant=wide((len(ctx.taps.targets), channels)),
            dx=torch.empty((count, channels), dtype=x.dtype, device=x.device),
            dweights=wide((parts, weight.shape[1], channels)),
            dbias=wide((parts, channels)),
        )
        with torch.cuda.device_of(x):
            if results.dx.numel():
                weight_launch(inputs, results).run()
            if results.distant.numel():
                distant_launch(inputs, results).run()
            if results.dx.numel():
                input_launch(inputs, results).run()
        dweight = results.dweights.sum(0).flip(0).mT.to(weight.dtype)
        dbias = None if bias is None else results.dbias.sum(0).to(bias.dtype)
        return results.dx, dweight, dbias, None, None


def _with_rows(x: Tensor) -> Tensor:
    """Return x [N, C], copied if the channels of a token are not side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


def _by_taps(weight: Tensor) -> Tensor:
    """Return weight [C, W] as float32 [W, C], row i for tap i."""
    return weight.float().mT.flip(0).contiguous()


def triton_convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, taps: ConvolutionTaps
) -> Tensor:
    """Return the convolution of the tokens of a tree, [N, C]; arguments as in `convolution.convolve`.

    The dtype of `x` is one of `_DTYPES`. Rows may be a part of wider ones; channels side by side are not copied.

    Raises:
        TreepackError: if the activation is not silu or none.
    """
    out: Tensor = _TreeConvolution.apply(x, weight, bias, check_activation(activation), taps)
    return out

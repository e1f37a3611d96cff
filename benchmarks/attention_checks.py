"""Checks of tree attention on a GPU: accuracy against the float64 reference, stray memory, sizes, determinism.

    check(name, function, device)  ->  [Result, ...]      for every item of `CHECKS`; each runs in a process of its own

An implementation is `flex`, `portable` (the project's Triton kernels) or `hopper` (its Hopper kernels, on such a GPU).
An error is the RMS of the difference over the RMS of the reference; there is one error for the output and one for each
gradient of q, k and v. If the reference is zero, the error is relative to the RMS of the incoming gradient.

Bounds. float32: 50 times its rounding of 2**-24 for flex, 1e-5 for the kernels. bfloat16 and float16: 8 times their
rounding of 2**-9 and 2**-12. If flex ran on the same input, the bound of the kernels is also 1.2 times its error, and
at least twice the rounding on rows that are too short to compare two errors.

Before every call the free memory of the allocator is filled with NaN, and the inputs are views into buffers of NaN.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from candidates import portable_kernels
from torch import Tensor
from workloads import agent_tree, chains, star

from treepack.attention import KeyReach, first_visible, reference_attention, tree_attention

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
KERNEL_FLOAT32 = 1e-5
SHORT = 1000  # rows below this many tokens have too few elements to compare the errors of two implementations
LENGTHS = (1, 12, 127, 129, 1000, 4095, 8192)
QUICK_LENGTHS = (1, 129, 1000)

# Query heads, key heads, head dimensions (of q and k, of v) and scale.
Layout = tuple[int, int, int, int, float | None]
# With the dtype, and whether flex, which takes longest to compile, runs as well.
LAYOUTS: tuple[tuple[Layout, torch.dtype, bool], ...] = (
    ((6, 2, 64, 64, None), torch.bfloat16, True),
    ((6, 2, 64, 64, None), torch.float16, True),
    ((6, 2, 64, 64, None), torch.float32, True),
    ((4, 4, 128, 128, 0.05), torch.bfloat16, True),
    ((4, 4, 128, 128, 0.05), torch.float16, False),
    ((4, 4, 128, 128, 0.05), torch.float32, False),
    ((4, 1, 80, 80, None), torch.bfloat16, True),
    ((4, 2, 96, 96, None), torch.bfloat16, True),
    ((4, 2, 96, 96, None), torch.float32, False),
    ((2, 1, 256, 256, None), torch.bfloat16, True),
    ((2, 1, 256, 256, None), torch.float16, False),
    ((2, 1, 256, 256, None), torch.float32, False),
    ((4, 4, 192, 128, None), torch.bfloat16, True),
    ((4, 2, 192, 128, None), torch.float16, False),
)

# Head dimensions of the Hopper kernels.
HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
REACHES = (None, *(KeyReach("window", size) for size in (1, 31, 128, 1000)), KeyReach("chunk", 100))

Inputs = tuple[Tensor, ...]  # q, k, v, and sinks if the layer has them
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Result:
    """The errors of output, dq, dk and dv, or one error, and the bound of each."""

    check: str
    case: str
    implementation: str
    errors: tuple[float, ...]
    bounds: tuple[float, ...]
    note: str = ""

    @property
    def passed(self) -> bool:
        """Return whether every error is a number within its bound."""
        return not self.note.startswith("raised") and all(a <= b for a, b in zip(self.errors, self.bounds, strict=True))

    @property
    def use(self) -> float:
        """Return the largest ratio of an error to its bound."""
        return max((a / b if b else float(a > 0) for a, b in zip(self.errors, self.bounds, strict=True)), default=0.0)


def random_forest_ends(length: int, seed: int) -> Tensor:
    """Return subtree_end int32 [T] of a random depth-first forest: runs, branches at any offset, a few new roots."""
    generator = np.random.default_rng(seed)
    end, path = np.arange(1, length + 1), list[int]()
    for i in range(length):
        draw = generator.random()
        # 1 token in 50 starts a branch, and 1 in 500 may start a new root.
        if path and draw < 0.02:
            keep = int(generator.integers(0 if draw < 0.002 else 1, len(path) + 1))
            end[path[keep:]] = i
            del path[keep:]
        path.append(i)
    end[path] = length
    return torch.tensor(end, dtype=torch.int32)


def poison(like: Tensor) -> None:
    """Fill the free memory of the allocator with NaN: four tensors like this one, and some of every size."""
    if like.device.type == "cuda":
        torch.cuda.empty_cache()
        sizes = [like.numel()] * 4 + [1 << 28] + [1 << n for n in range(8, 24) for _ in range(4)]
        blocks = [like.new_full((size,), torch.nan) for size in sizes]
        del blocks


def amid_nan(values: Tensor, *, extra: int = 8) -> Tensor:
    """Return `values` [B, H, T, D] as a view, tokens before heads, into a buffer with NaN on every side.

    Rows of the buffer are `extra` elements longer: 8 keeps every address a multiple of 16 bytes, 1 does not.
    """
    # [B, T + 64, H + 2, D + extra] -> [B, T, H, D] -> [B, H, T, D]
    batch, heads, length, size = values.shape
    buffer = values.new_full((batch, length + 64, heads + 2, size + extra), torch.nan)
    view = buffer[:, 32 : 32 + length, 1 : 1 + heads, :size].transpose(1, 2)
    view.copy_(values)
    return view


def draw_inputs(end: Tensor, layout: Layout, dtype: torch.dtype) -> tuple[Inputs, Tensor]:
    """Draw q, k, v and the gradient of the output; equal rows and layouts give equal numbers."""
    heads, kv_heads, size, size_v, _ = layout
    batch, length = end.shape
    generator = torch.Generator(end.device).manual_seed(length)
    shapes = ((heads, size), (kv_heads, size), (kv_heads, size_v), (heads, size_v))
    made = [torch.randn(batch, n, length, d, generator=generator, device=end.device).to(dtype) for n, d in shapes]
    return (made[0], made[1], made[2]), made[3]


def outputs(attend: Callable[..., Tensor], inputs: Inputs, weight: Tensor) -> Outputs:
    """Return the output and the gradients of the inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, weight)


def run(
    name: str, end: Tensor, scale: float | None, inputs: Inputs, weight: Tensor, start: Tensor | None = None
) -> Outputs:
    """Return `outputs` of the implementation called `name`; `start` is the first token that each token sees."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        impl = "flex" if name == "flex" else "triton"
        return tree_attention(q, k, v, end, scale=scale, impl=impl, start=start, sinks=sinks)

    poison(inputs[0])
    with portable_kernels() if name == "portable" else nullcontext():
        return outputs(attend, inputs, weight)


def exact(end: Tensor, scale: float | None, inputs: Inputs, weight: Tensor, start: Tensor | None = None) -> Outputs:
    """Return `outputs` of the reference in float64."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return reference_attention(q, k, v, end, scale=scale, start=start, sinks=sinks)

    return outputs(attend, tuple(x.double() for x in inputs), weight.double())


def kernels(query: Tensor, value: Tensor) -> list[str]:
    """Return the names of the project's own kernels that run on these tensors."""
    from treepack.attention import autograd as kernel

    return list(dict.fromkeys([kernel.backend(query, value), "portable"]))


def measure(results: Outputs, expected: Outputs, weight: Tensor) -> tuple[float, ...]:
    """Return the errors that the file header defines."""
    errors = []
    for a, b in zip(results, expected, strict=True):
        size = float(b.double().norm())
        # A zero gradient, as of the query of a token that sees only itself, is zero up to rounding.
        floor = float(weight.double().norm()) * (b.numel() / weight.numel()) ** 0.5
        errors.append(float((a.double() - b.double()).norm()) / (size if size > 1e-6 * floor else floor))
    return tuple(errors)


def bounds_of(name: str, dtype: torch.dtype, length: int, flex: tuple[float, ...] | None) -> tuple[float, ...]:
    """Return the bounds of `name` that the file header defines; `flex` has the errors of flex, if it ran."""
    if dtype == torch.float32:
        return ((50 * ROUNDING[dtype]) if name == "flex" else KERNEL_FLOAT32,) * 4
    absolute = 8 * ROUNDING[dtype]
    if name == "flex" or flex is None:
        return (absolute,) * 4
    minimum = 2 * ROUNDING[dtype] if length < SHORT else 0.0
    return tuple(min(absolute, max(1.2 * error, minimum)) for error in flex)


def compare(
    check: str, case: str, end: Tensor, layout: Layout, dtype: torch.dtype, *, with_flex: bool, extra: int = 8
) -> Iterator[Result]:
    """Yield the result of every implementation on rows `end` [B, T], against the reference."""
    drawn, weight = draw_inputs(end, layout, dtype)
    expected = exact(end, layout[4], drawn, weight)
    inputs = (amid_nan(drawn[0], extra=extra), amid_nan(drawn[1], extra=extra), amid_nan(drawn[2], extra=extra))
    incoming = amid_nan(weight, extra=extra)
    flex: tuple[float, ...] | None = None
    for name in (["flex"] if with_flex else []) + kernels(inputs[0], inputs[2]):
        try:
            # FlexAttention copies the row into whole blocks, so it never reads the NaN beyond the row.
            errors = measure(run(name, end, layout[4], inputs, incoming), expected, weight)
        except Exception as error:  # an error must not hide the other results; it counts as a failure
            first = (str(error).strip().splitlines() or [""])[0]
            yield Result(check, case, name, (), (), f"raised {type(error).__name__}: {first[:120]}")
            continue
        flex = errors if name == "flex" else flex
        yield Result(check, case, name, errors, bounds_of(name, dtype, end.shape[1], flex))


def check_layout(index: int, check: str, device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Check rows of every length in one layout and dtype."""
    layout, dtype, with_flex = LAYOUTS[index]
    for length in QUICK_LENGTHS if quick else LENGTHS:
        end = random_forest_ends(length, length).to(device)[None]
        yield from compare(check, f"{length} tokens", end, layout, dtype, with_flex=with_flex)
    rows = torch.stack([random_forest_ends(600, seed) for seed in (1, 2)]).to(device)
    yield from compare(check, "2 rows", rows, layout, dtype, with_flex=False)
    yield from compare(check, "odd strides", rows, layout, dtype, with_flex=False, extra=1)


def check_shapes_of_trees(check: str, device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Check branches at every offset, one-token branches, block edges, and padding only."""
    layout, offsets = (4, 2, 64, 64, None), 8 if quick else 128
    rows = []
    for offset in range(offsets):
        # A stem and three teeth: sizes 1 129 64 130 -> teeth 1 130 194 324, subtree_end 324, 130, 194, 324
        sizes = [1 + offset, 129, 64, 130]
        teeth = np.cumsum(sizes)
        comb = np.repeat([teeth[-1], *teeth[1:]], sizes)
        rows.append(np.concatenate([comb, np.arange(len(comb) + 1, 513)]))
    forest = torch.tensor(np.stack(rows), dtype=torch.int32, device=device)
    cases = {"branches at every offset": forest}
    branches = star("", 100, 400 if quick else 10_000, 1).subtree_end
    cases["one-token branches"] = torch.tensor(branches, dtype=torch.int32, device=device)[None]
    edges = star("", 128, 6, 64).subtree_end
    cases["intervals end at block edges"] = torch.tensor(edges, dtype=torch.int32, device=device)[None]
    if not quick:
        # The prompt's key blocks are divided into shares.
        prompt = star("", 1000, 20, 500).subtree_end
        cases["a prompt with many answers"] = torch.tensor(prompt, dtype=torch.int32, device=device)[None]
    cases["padding only"] = torch.arange(1, 301, dtype=torch.int32, device=device)[None]
    for dtype in (torch.bfloat16, torch.float32):
        for case, end in cases.items():
            name = f"{case}, {str(dtype).removeprefix('torch.')}"
            yield from compare(check, name, end, layout, dtype, with_flex=False)


def check_gradients_in(check: str, device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Check the incoming gradient of a sum, which has stride 0 and no memory of its own."""
    layout, length = (4, 2, 64, 64, None), 300 if quick else 1500
    end = random_forest_ends(length, 3).to(device)[None]
    inputs, weight = draw_inputs(end, layout, torch.bfloat16)
    ones = weight.new_ones(()).expand(weight.shape)
    expected = exact(end, None, inputs, ones)
    for name in kernels(inputs[0], inputs[2]):
        errors = measure(run(name, end, None, inputs, ones), expected, ones)
        yield Result(check, "gradient of a sum", name, errors, bounds_of(name, torch.bfloat16, length, None))


def check_determinism(check: str, device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Check that two runs are equal in every bit; the error is the number of elements that differ."""
    for dims, dtype in (*((dims, torch.bfloat16) for dims in HEAD_DIMS), ((128, 128), torch.float32)):
        layout = (14, 2, *dims, None)
        end = random_forest_ends(300, 5) if quick else torch.from_numpy(star("", 1000, 14, 500).subtree_end).int()
        end = end.to(device)[None]
        inputs, weight = draw_inputs(end, layout, dtype)
        for name in kernels(inputs[0], inputs[2]):
            first = run(name, end, None, inputs, weight)
            again = run(name, end, None, inputs, weight)
            # Compare bits, because NaN is not equal to itself.
            kind = torch.int32 if dtype == torch.float32 else torch.int16
            differing = [float((a.view(kind) != b.view(kind)).sum()) for a, b in zip(first, again, strict=True)]
            case = f"head size {'/'.join(map(str, dims))}, {str(dtype).removeprefix('torch.')}"
            yield Result(check, case, name, tuple(differing), (0.0,) * 4)


def check_windows(dims: tuple[int, int], check: str, device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Check windows, chunks and sinks, and that two runs are equal in every bit; the fifth error is the sinks'."""
    layout = (4, 2, *dims, None)
    end = random_forest_ends(129 if quick else 2500, 9).to(device)[None]
    (q, k, v), weight = draw_inputs(end, layout, torch.bfloat16)
    # The gradient of a sink is a sum over queries. Positive means keep its terms from cancelling one another.
    weight = weight + 0.5
    inputs = (q, k, v + 0.5, torch.linspace(-2, 4, layout[0], device=device))
    for reach in REACHES:
        start = first_visible(end, reach)
        expected = exact(end, None, inputs, weight, start)
        for name in kernels(inputs[0], inputs[2]):
            results = run(name, end, None, inputs, weight, start)
            again = run(name, end, None, inputs, weight, start)
            equal = all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
            errors = measure(results, expected, weight)
            case = "no window" if reach is None else f"{reach.kind} {reach.size}"
            note = "" if equal else "raised: two runs differ"
            yield Result(check, case, name, errors, (8 * ROUNDING[torch.bfloat16],) * 5, note)


def check_long(check: str, device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Check 131,072 tokens against flex; both round, but the bound stays that of one implementation."""
    layout, length = (4, 2, 128, 128, None), 1024 if quick else 131_072
    end = torch.tensor(agent_tree("", max(length, 3500), seed=7).subtree_end, dtype=torch.int32, device=device)[None]
    inputs, weight = draw_inputs(end, layout, torch.bfloat16)
    expected = run("flex", end, None, inputs, weight)
    for name in kernels(inputs[0], inputs[2]):
        errors = measure(run(name, end, None, inputs, weight), expected, weight)
        yield Result(
            check, f"{end.shape[1]:,} tokens", name, errors, (8 * ROUNDING[torch.bfloat16],) * 4, "against flex"
        )


def check_overflow(check: str, device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Check more than 2**31 elements in each of q, k and v: chains at both ends against the reference."""
    batch, heads, size, chain = (3, 48, 128, 1024) if not quick else (2, 2, 64, 256)
    count = 128 if not quick else 3
    length = count * chain
    end = torch.tensor(chains("", count, chain).subtree_end, dtype=torch.int32, device=device).expand(batch, -1)
    generator = torch.Generator(device).manual_seed(0)
    sizes = (batch, heads, length, size)
    drawn = [torch.randn(sizes, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(4)]
    places = [(0, 0, 0), (batch - 1, heads - 1, count - 1), (batch - 1, 0, count - 1), (1, heads // 2, count // 2)]
    for order in ("heads first", "tokens first"):
        # The same memory, read in another order; its numbers are random in both orders.
        q, k, v, weight = (
            x if order == "heads first" else x.view(batch, length, heads, size).transpose(1, 2) for x in drawn
        )
        for name in kernels(q, v):
            results = run(name, end, None, (q, k, v), weight)
            worst: tuple[float, ...] = (0.0,) * 4
            for row, head, number in places:
                at = (slice(row, row + 1), slice(head, head + 1), slice(number * chain, (number + 1) * chain))
                part = (q[at], k[at], v[at])
                causal = torch.full((1, chain), chain, dtype=torch.int32, device=device)
                errors = measure(tuple(x[at] for x in results), exact(causal, None, part, weight[at]), weight[at])
                worst = tuple(max(a, b) for a, b in zip(worst, errors, strict=True))
            del results
            case = f"{q.numel() / 2**31:.2f} * 2**31 elements, {order}"
            yield Result(check, case, name, worst, (8 * ROUNDING[torch.bfloat16],) * 4)


def layout_name(index: int) -> str:
    """Return query heads / key heads / head dimensions, and the dtype, as text."""
    layout, dtype, _ = LAYOUTS[index]
    sizes = layout[:3] if layout[2] == layout[3] else layout[:4]
    return f"{'/'.join(map(str, sizes))} {str(dtype).removeprefix('torch.')}"


CHECKS: dict[str, Callable[..., Iterator[Result]]] = {
    **{layout_name(index): partial(check_layout, index) for index in range(len(LAYOUTS))},
    "shapes of trees": check_shapes_of_trees,
    "incoming gradient": check_gradients_in,
    "bitwise equal runs": check_determinism,
    **{f"windows, sinks {'/'.join(map(str, dims))}": partial(check_windows, dims) for dims in HEAD_DIMS},
    "long row": check_long,
}
# This check runs alone on the GPU, because it takes 50 GB.
LAST = {"offsets past 2**31": check_overflow}


def check(name: str, function: Callable[..., Iterator[Result]], device: torch.device, *, quick: bool) -> list[Result]:
    """Return the results of a check, such as one of `CHECKS`; an error of a kernel or a launch is a result too."""
    results = []
    try:
        for result in function(name, device, quick=quick):
            results.append(result)
            gc.collect()
    except Exception as error:  # the other checks must still run; it counts as a failure
        first = (str(error).strip().splitlines() or [""])[0]
        results.append(Result(name, "", "", (), (), f"raised {type(error).__name__}: {first[:160]}"))
    return results

"""The kernels of `fused_statistics`, in Triton's interpreter, equal the statistics in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from treepack.data.ragged_tensor import RaggedTensor
from treepack.model.head.head_chunks import ChunkTargets
from treepack.model.head.logit_map import LogitMap, TargetSlopes
from treepack.model.head.token_statistics import token_statistics, torch_gradients, torch_statistics
from treepack.ragged import RaggedArray

fused = pytest.importorskip("treepack.model.head.fused_statistics", reason="needs triton")

MAPS = [LogitMap(), LogitMap(0.3), LogitMap(-2.0, 15.0)]
# A block of 16 words in 40: two whole blocks and a part of one.
WORDS, BLOCK = 40, 16


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "STATISTICS_BLOCK", BLOCK)
    monkeypatch.setattr(fused, "GRADIENT_BLOCK", BLOCK)
    monkeypatch.setattr(fused, "KEPT_BLOCK", 4)


def rows(spread: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [6, WORDS], labels and temperatures [6]."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(6, WORDS, generator=generator) * spread).to(dtype)
    return x, torch.tensor([0, 39, 15, 16, 3, 32]), torch.tensor([1.0, 0.7, 0.1, 2.0, 1.3, 1.0])


def plain(labels: Tensor, temperature: Tensor | None = None) -> ChunkTargets:
    """Return targets that each have a state of their own."""
    every = torch.arange(len(labels) + 1, dtype=torch.int32)
    return ChunkTargets(every[:-1].long(), every[:-1], every, labels, temperature)


def shared(labels: Tensor, temperature: Tensor | None = None) -> ChunkTargets:
    """Return six targets of three states, with 3, 1 and 2 targets."""
    rows, first = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0, 3, 4, 6])
    return ChunkTargets(torch.arange(3), rows.int(), first.int(), labels, temperature)


def with_sets(targets: ChunkTargets) -> ChunkTargets:
    """Return the targets with kept sets: of one word, of several blocks, none, overlapping ones, and all words."""
    others = [[], [1, 5, 6, 7, 8, 9, 22, 38], None, [15, 17], range(WORDS), [0, 1, 31, 33]]
    lists = [
        [] if own is None else sorted({label, *own}) for label, own in zip(targets.labels.tolist(), others, strict=True)
    ]
    return replace(targets, kept=RaggedTensor.of(RaggedArray.of(lists, np.int32)))


def is_left_out(targets: ChunkTargets) -> Tensor:
    """Return True for each word [6, WORDS] that is not in the set of a target."""
    assert targets.kept is not None
    dense = torch.zeros(len(targets.labels), WORDS, dtype=torch.bool)
    for i, (a, b) in enumerate(pairwise(targets.kept.offsets.tolist())):
        dense[i] = a < b
        dense[i, targets.kept.values[a:b].long()] = False
    return dense


def kernels(x: Tensor, targets: ChunkTargets, logit_map: LogitMap, used: tuple[int, ...] = (0, 1)) -> list[Tensor]:
    """Return log-probabilities, entropies and the gradient of x, of the kernels."""
    x = x.clone()
    found = fused.fused_statistics(x, targets, logit_map)
    fused.fused_gradients(x, targets, logit_map, found, slopes(torch.float32, used))
    return [found.logprobs, found.entropies, x]


def in_torch(x: Tensor, targets: ChunkTargets, logit_map: LogitMap, used: tuple[int, ...] = (0, 1)) -> list[Tensor]:
    """Return the same in torch."""
    x = x.clone()
    found = torch_statistics(x, targets, logit_map, with_entropies=True)
    torch_gradients(x, targets, logit_map, found, slopes(found.logprobs.dtype, used))
    return [found.logprobs, found.entropies, x]


def slopes(dtype: torch.dtype, used: tuple[int, ...]) -> TargetSlopes:
    """Return slopes of six targets; different ones, so that they cannot cancel or be swapped."""
    both = [torch.linspace(-1, 2, 6, dtype=dtype), torch.linspace(3, -1, 6, dtype=dtype)]
    return TargetSlopes(*(each if i in used else None for i, each in enumerate(both)))


@pytest.mark.parametrize("targets_of", [plain, shared])
@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("kept", [False, True])
def test_gradients_in_torch_are_those_of_autograd(
    targets_of: Callable[..., ChunkTargets], logit_map: LogitMap, used: tuple[int, ...], kept: bool
) -> None:
    x, labels, temperature = rows(3.0, torch.float64)
    targets = with_sets(targets_of(labels, temperature)) if kept else targets_of(labels, temperature)
    x = x[: len(targets.states)].requires_grad_()
    y = x * logit_map.scale if logit_map.cap is None else logit_map.cap * (x * logit_map.scale / logit_map.cap).tanh()
    z = y[targets.rows] / temperature[:, None].double()
    logs = (z.masked_fill(is_left_out(targets), -torch.inf) if kept else z).log_softmax(-1)
    outputs = logs[range(6), labels], -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0)).sum(-1)
    factors = slopes(torch.float64, used)
    torch.autograd.backward([outputs[i] for i in used], [factors[i] for i in used])
    for ours, theirs in zip(in_torch(x.detach(), targets, logit_map, used), [*outputs, x.grad], strict=True):
        assert theirs is not None
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-13)


# All eight of the first three, all nine of the last two, and each pair of one and the other. A wrong series near 0
# fails only with a cap, a spread of 3 and no temperature.
CASES = [
    (plain, False, False, MAPS[0], 1e-3),
    (shared, False, True, MAPS[0], 3.0),
    (plain, True, False, MAPS[0], 200.0),
    (shared, False, True, MAPS[1], 1e-3),
    (shared, True, False, MAPS[1], 3.0),
    (plain, True, True, MAPS[1], 200.0),
    (shared, True, True, MAPS[2], 1e-3),
    (plain, False, True, MAPS[2], 3.0),
    (shared, False, False, MAPS[2], 200.0),
]


@pytest.mark.parametrize(("targets_of", "tempered", "kept", "logit_map", "spread"), CASES)
def test_the_kernels_equal_torch(
    targets_of: Callable[..., ChunkTargets], tempered: bool, kept: bool, logit_map: LogitMap, spread: float
) -> None:
    x, labels, temperature = rows(spread)
    targets = targets_of(labels, temperature if tempered else None)
    targets = with_sets(targets) if kept else targets
    x = x[: len(targets.states)]
    for ours, theirs in zip(kernels(x, targets, logit_map), in_torch(x.double(), targets, logit_map), strict=True):
        # relative to the largest logit after the temperature, whose rounding is in every value
        size = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-6 * size)


def test_words_outside_of_all_sets_of_a_state_get_no_gradient() -> None:
    x, labels, temperature = rows(2.0)
    targets = with_sets(plain(labels, temperature))
    for found in (kernels(x, targets, LogitMap()), in_torch(x, targets, LogitMap())):
        assert bool((found[2][is_left_out(targets)] == 0).all())
        assert found[0][0] == found[1][0] == 0  # a set of one word


@pytest.mark.parametrize("used", [(0,), (1,)])
def test_the_gradient_of_one_output_alone(used: tuple[int, ...]) -> None:
    x, labels, temperature = rows(2.0)
    targets = plain(labels, temperature.clamp(min=0.7))
    ours, theirs = kernels(x, targets, LogitMap(), used)[2], in_torch(x.double(), targets, LogitMap(), used)[2]
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def test_entropies_of_nearly_certain_words_keep_their_digits() -> None:
    x = torch.zeros(1, WORDS)
    x[0, 20] = 18.0  # 39 words share a probability of 6e-7, and the entropy is 1.1e-5
    targets = plain(torch.tensor([20]))
    exact = torch_statistics(x.double(), targets, LogitMap(), with_entropies=True).entropies
    ours = fused.fused_statistics(x, targets, LogitMap()).entropies
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-8)


def test_words_that_cannot_be_chosen_get_no_gradient() -> None:
    x, _, _ = rows(2.0)
    x[:, 16:32] = float("-inf")  # a whole block
    x[1, :16] = float("-inf")  # the first blocks of a row
    targets = plain(torch.tensor([0, 39, 15, 1, 3, 32]))
    actual, exact = kernels(x, targets, LogitMap()), in_torch(x.double(), targets, LogitMap())
    assert bool((actual[2][x == float("-inf")] == 0).all())
    for ours, theirs in zip(actual, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs.nan_to_num(), rtol=1e-5, atol=1e-6)


def test_half_precision_is_read_as_it_is_and_gradients_have_its_dtype() -> None:
    x, labels, temperature = rows(2.0, torch.float16)
    targets = plain(labels, temperature)
    actual, exact = kernels(x, targets, LogitMap()), in_torch(x.double(), targets, LogitMap())
    assert [each.dtype for each in actual] == [torch.float32, torch.float32, torch.float16]
    for ours, theirs in zip(actual[:2], exact[:2], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual[2].double(), exact[2], rtol=2e-3, atol=1e-4)


def test_a_label_outside_the_vocabulary_gives_nan() -> None:
    x, _, _ = rows(1.0)
    assert bool(fused.fused_statistics(x, plain(torch.full((6,), WORDS)), LogitMap()).logprobs.isnan().all())


def test_on_a_cpu_the_statistics_are_those_of_torch_in_float32() -> None:
    x, labels, temperature = rows(1.0, torch.bfloat16)
    ours = token_statistics(x, plain(labels, temperature), LogitMap(), with_entropies=True)
    theirs = torch_statistics(x.float(), plain(labels, temperature), LogitMap(), with_entropies=True)
    assert all(torch.equal(*pair) for pair in zip(ours[:3], theirs[:3], strict=True))
    assert ours.divergences is None

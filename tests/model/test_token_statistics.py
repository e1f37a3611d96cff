"""The kernels of `fused_statistics`, in Triton's interpreter, equal the statistics in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from treepack.model.token_statistics import LogitMap, TokenStatistics, token_statistics

fused = pytest.importorskip("treepack.model.fused_statistics", reason="needs triton")

MAPS = [LogitMap(), LogitMap(0.3), LogitMap(-2.0, 15.0)]
# A block of 16 words in 40: two whole blocks and a part of one.
WORDS, BLOCK = 40, 16


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "FORWARD_BLOCK", BLOCK)
    monkeypatch.setattr(fused, "BACKWARD_BLOCK", BLOCK)


def rows(spread: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [6, WORDS], labels and temperatures [6]."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(6, WORDS, generator=generator) * spread).to(dtype)
    return x, torch.tensor([0, 39, 15, 16, 3, 32]), torch.tensor([1.0, 0.7, 0.1, 2.0, 1.3, 1.0])


def statistics(function: Any, x: Tensor, *arguments: Any, used: tuple[int, ...] = (0, 1)) -> list[Tensor]:
    """Return log-probabilities, entropies and the gradient of x."""
    x = x.clone().requires_grad_()
    outputs = function.apply(x, *arguments)
    factors = [torch.linspace(-1, 2, len(x)), torch.linspace(3, -1, len(x))]
    torch.autograd.backward([outputs[i] for i in used], [factors[i].to(outputs[i].dtype) for i in used])
    assert x.grad is not None
    return [*outputs, x.grad]


@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize("spread", [1e-3, 3.0, 200.0])
def test_the_kernels_equal_torch(logit_map: LogitMap, tempered: bool, spread: float) -> None:
    x, labels, temperature = rows(spread)
    rest = labels, temperature if tempered else None, logit_map, True
    actual = statistics(fused.FusedStatistics, x, *rest)
    exact = statistics(TokenStatistics, x.double(), *rest)
    for ours, theirs in zip(actual, exact, strict=True):
        # relative to the largest logit after the temperature, whose rounding is in every value
        size = max(1.0, float(theirs.detach().abs().max()))
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-6 * size)


@pytest.mark.parametrize("used", [(0,), (1,)])
def test_the_gradient_of_one_output_alone(used: tuple[int, ...]) -> None:
    x, labels, temperature = rows(2.0)
    rest = labels, temperature.clamp(min=0.7), LogitMap(), True
    ours, theirs = (
        statistics(function, each, *rest, used=used)[2]
        for function, each in ((fused.FusedStatistics, x), (TokenStatistics, x.double()))
    )
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def test_entropies_of_nearly_certain_words_keep_their_digits() -> None:
    x = torch.zeros(1, WORDS)
    x[0, 20] = 18.0  # 39 words share a probability of 6e-7, and the entropy is 1.1e-5
    exact = TokenStatistics.apply(x.double(), torch.tensor([20]), None, LogitMap(), True)[1]  # type: ignore[no-untyped-call]
    ours = fused.FusedStatistics.apply(x, torch.tensor([20]), None, LogitMap(), True)[1]
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-8)


def test_words_that_cannot_be_chosen_get_no_gradient() -> None:
    x, labels, _ = rows(2.0)
    x[:, 16:32] = float("-inf")  # a whole block
    x[1, :16] = float("-inf")  # the first blocks of a row
    labels = torch.tensor([0, 39, 15, 1, 3, 32])
    rest = labels, None, LogitMap(), True
    actual, exact = statistics(fused.FusedStatistics, x, *rest), statistics(TokenStatistics, x.double(), *rest)
    assert bool((actual[2][x == float("-inf")] == 0).all())
    for ours, theirs in zip(actual[:2], exact[:2], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual[2].double(), exact[2].nan_to_num(), rtol=1e-5, atol=1e-6)


def test_half_precision_is_read_as_it_is_and_gradients_have_its_dtype() -> None:
    x, labels, temperature = rows(2.0, torch.float16)
    rest = labels, temperature, LogitMap(), True
    actual, exact = statistics(fused.FusedStatistics, x, *rest), statistics(TokenStatistics, x.double(), *rest)
    assert [each.dtype for each in actual] == [torch.float32, torch.float32, torch.float16]
    for ours, theirs in zip(actual[:2], exact[:2], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual[2].double(), exact[2], rtol=2e-3, atol=1e-4)


def test_a_label_outside_the_vocabulary_gives_nan() -> None:
    x, _, _ = rows(1.0)
    logprobs = fused.FusedStatistics.apply(x, torch.full((6,), WORDS), None, LogitMap(), True)[0]
    assert bool(logprobs.isnan().all())


def test_unwanted_entropies_are_nan_and_need_no_gradient() -> None:
    x, labels, _ = rows(1.0)
    for function in (fused.FusedStatistics, TokenStatistics):
        entropies = function.apply(x.clone().requires_grad_(), labels, None, LogitMap(), False)[1]
        assert bool(entropies.isnan().all())
        assert not entropies.requires_grad


def test_on_a_cpu_the_statistics_are_those_of_torch_in_float32() -> None:
    x, labels, temperature = rows(1.0, torch.bfloat16)
    ours = token_statistics(x, labels, temperature, LogitMap(), True)
    theirs: Any = TokenStatistics.apply(x.float(), labels, temperature, LogitMap(), True)  # type: ignore[no-untyped-call]
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))

"""Loss, log-probabilities and entropies equal their definitions, and the logits of a row never exist as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.oracle_model import VOCABULARY, Sample, make_row, sample_sets
from treepack.data.batch import make_batch
from treepack.model.head.logit_map import LogitMap, OutputLayer
from treepack.model.head.token_loss import tree_logprobs, weighted_nll

HIDDEN = 8


def random_head(length: int, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(length, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,)]
    hidden, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


@given(sample_sets())
@settings(max_examples=30, derandomize=True, deadline=None)
def test_weighted_nll_is_the_weighted_sum_over_targets_for_any_chunk(samples: list[Sample]) -> None:
    batch = make_batch(make_row(samples), multiple=8)
    inputs = random_head(len(batch.input_ids))
    hidden, weight, bias = inputs
    expected = hidden.sum() * 0
    for j, token_weight in enumerate(batch.loss_weight.tolist()):
        if token_weight:
            logits = weight @ hidden[batch.parent[j]] + bias
            expected = expected + token_weight * cross_entropy(logits, batch.input_ids[j])
    reference = torch.autograd.grad(expected, inputs, allow_unused=True, materialize_grads=True)
    for chunk in (1, 3, 2048):  # each target alone, a last chunk that is shorter, all at once
        loss = weighted_nll(hidden, OutputLayer(weight, bias), batch.targets, chunk=chunk)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        for ours, theirs in zip(grads, reference, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_weight_at_a_root_is_an_error_and_not_the_last_token() -> None:
    # Index -1 would be the last token of the row, and the loss a number without meaning.
    targets = (torch.tensor([1, 2]), torch.tensor([-1, 0]), torch.tensor([1.0, 1.0]))
    hidden, weight, _ = random_head(2)
    with pytest.raises((IndexError, RuntimeError)):
        weighted_nll(hidden, OutputLayer(weight), targets)


def test_bfloat16_hidden_states_get_a_float32_softmax() -> None:
    batch = make_batch(make_row([Sample(tuple(range(30)), (0.0, *[1.0] * 29))]))
    hidden, weight, _ = (x.detach() for x in random_head(30, dtype=torch.bfloat16))
    logits = (hidden @ weight.T)[:-1].float()
    expected = cross_entropy(logits, batch.input_ids[1:], reduction="sum").double()
    torch.testing.assert_close(weighted_nll(hidden, OutputLayer(weight), batch.targets), expected, rtol=1e-6, atol=0)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.parametrize("chunk", [16, 10_000])
def test_no_logits_beyond_a_chunk_exist_in_forward_or_backward(chunk: int) -> None:
    length = 400
    tokens = tuple(i % VOCABULARY for i in range(length))
    batch = make_batch(make_row([Sample(tokens, (0.0, *[1.0] * (length - 1)))]))
    hidden, weight, _ = random_head(length)
    saved: list[int] = []  # sizes of the tensors that autograd keeps for the backward pass

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), LargestTensor() as largest:
        torch.autograd.backward(weighted_nll(hidden, OutputLayer(weight), batch.targets, chunk=chunk))
    whole = (length - 1) * VOCABULARY
    if chunk < length:
        assert largest.numel <= max(chunk * VOCABULARY, length * HIDDEN) < whole
        assert max(saved, default=0) < whole
    else:
        assert largest.numel == whole, "the measurement sees the logits if they exist"


MAPS = [LogitMap(), LogitMap(0.3), LogitMap(1.0, 2.0), LogitMap(-2.0, 1.5)]


@given(sample_sets(), st.sampled_from(MAPS), st.booleans(), st.sampled_from([1, 3, 2048]), st.integers(0, 99))
@settings(max_examples=30, derandomize=True, deadline=None)
def test_logprobs_and_entropies_are_those_of_the_tempered_distribution(
    samples: list[Sample], logit_map: LogitMap, per_token: bool, chunk: int, seed: int
) -> None:
    batch = make_batch(make_row(samples))
    inputs = random_head(len(batch.input_ids))
    hidden, weight, bias = inputs
    tokens = batch.loss_weight.nonzero().squeeze(-1).repeat_interleave(2)  # each token at two temperatures
    generator = torch.Generator().manual_seed(seed)
    temperature = torch.rand(len(tokens), generator=generator) * 2 + 0.1 if per_token else 0.7
    logits = hidden[batch.parent[tokens]] @ weight.T + bias
    logits = logit_map.scale * logits
    if logit_map.cap is not None:
        logits = logit_map.cap * (logits / logit_map.cap).tanh()
    divisor = temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature
    logs = (logits / divisor).log_softmax(-1)
    expected = (logs[range(len(tokens)), batch.input_ids[tokens]], -(logs.exp() * logs).sum(-1))
    targets = tokens, batch.input_ids, batch.parent
    layer = OutputLayer(weight, bias, logit_map)
    results = tree_logprobs(hidden, layer, targets, temperature=temperature, chunk=chunk)
    grads = []
    for values in (results, expected):
        for ours, theirs in zip(values, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        factors = torch.linspace(-1, 2, len(tokens), dtype=torch.float64)
        total = hidden.sum() * 0 + (values[0] * factors).sum() + (values[1] * factors.flip(0)).sum()
        grads.append(torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_entropies_that_are_not_wanted_are_not_computed() -> None:
    batch = make_batch(make_row([Sample((1, 2, 3), (0.0, 1.0, 1.0))]))
    hidden, weight, _ = random_head(3)
    tokens = torch.tensor([1, 2])
    arguments = hidden, OutputLayer(weight), (tokens, batch.input_ids, batch.parent)
    logprobs, entropies = tree_logprobs(*arguments, with_entropies=False)
    assert bool(entropies.isnan().all())
    expected = tree_logprobs(*arguments)[0]
    assert torch.equal(logprobs, expected)
    ours, theirs = (torch.autograd.grad(values.sum(), hidden)[0] for values in (logprobs, expected))
    assert torch.equal(ours, theirs)


def test_no_chosen_token_gives_nothing_and_keeps_the_graph() -> None:
    batch = make_batch(make_row([Sample((1, 2), (0.0, 0.0))]))
    hidden, weight, _ = random_head(2)
    none = torch.zeros(0, dtype=torch.int64)
    logprobs, entropies = tree_logprobs(hidden, OutputLayer(weight), (none, batch.input_ids, batch.parent))
    assert (logprobs.shape, entropies.shape) == ((0,), (0,))
    assert torch.equal(torch.autograd.grad(logprobs.sum(), hidden)[0], torch.zeros_like(hidden))


def test_logprobs_of_a_chunk_are_the_only_ones_whose_logits_exist() -> None:
    length, chunk = 400, 16
    tokens = tuple(i % VOCABULARY for i in range(length))
    batch = make_batch(make_row([Sample(tokens, (0.0, *[1.0] * (length - 1)))]))
    hidden, weight, _ = random_head(length)
    chosen = torch.arange(1, length), batch.input_ids, batch.parent
    with LargestTensor() as largest:
        results = tree_logprobs(hidden, OutputLayer(weight), chosen, chunk=chunk)
        torch.autograd.backward(torch.stack(results).sum())
    assert largest.numel <= max(chunk * VOCABULARY, length * HIDDEN)

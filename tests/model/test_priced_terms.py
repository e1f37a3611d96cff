"""A loss whose gradients are computed in the forward pass equals the one that computes logits twice, in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from support.refusal import refusal
from treepack.data.batch import TermTensors
from treepack.model.experts.weights import cast_once
from treepack.model.head.head_chunks import invert, split_targets
from treepack.model.head.logit_map import LogitMap, OutputLayer
from treepack.model.head.term_prices import prices_of_terms
from treepack.model.head.token_loss import priced_terms, tree_logprobs, weighted_nll
from treepack.model.term_objective import TermObjective
from treepack.objectives.losses import name_sums, objective_loss, weigh_terms
from treepack.objectives.objective import Objective, choose_objective

VOCABULARY, HIDDEN = 11, 5

OBJECTIVES = [
    choose_objective("ppo"),
    choose_objective("ppo", dual_clip=2.0, clip_low=0.1, entropy=0.3),
    choose_objective("grpo", kl=0.2, kl_estimator="k2", importance_cap=1.5),
    choose_objective("dapo", entropy=0.1, kl=0.1),
    choose_objective("cispo", kl=0.1, kl_estimator="k1"),
    choose_objective("ppo", denominator="edge"),
    choose_objective("sapo", importance_cap=1.2, importance_mask=(0.5, 2.0)),
    choose_objective("dppo_tv", clip_low=0.05, clip_high=0.05),
    choose_objective("dppo_kl", clip_low=0.01, clip_high=0.01, kl=0.1),
    choose_objective("dro", beta=0.4, entropy=0.2),
    choose_objective("reinforce"),
]


def random_head(generator: torch.Generator, length: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = [(length, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,)]
    hidden, weight, bias = (torch.randn(each, generator=generator, dtype=torch.float64) for each in shapes)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def random_tree(generator: torch.Generator, length: int) -> Tensor:
    """Return a parent before each token, -1 at the first; small numbers are often chosen, so that states branch."""
    parents = [-1] + [int(torch.randint(max(1, j - 4), j + 1, (), generator=generator)) - 1 for j in range(1, length)]
    return torch.tensor([max(0, each) if j else -1 for j, each in enumerate(parents)])


def random_terms(generator: torch.Generator, tokens: Tensor, *, tempered: bool, with_old: bool) -> TermTensors:
    """Return up to four terms for each token, of five trajectories, in no order."""
    index = torch.arange(len(tokens)).repeat(4)[torch.randperm(4 * len(tokens), generator=generator)]
    index = index[: 3 * len(tokens)].int()

    def column(scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
        return (torch.randn(len(index), generator=generator, dtype=torch.float64) * scale).to(dtype)

    return TermTensors(
        tokens=tokens,
        index=index,
        trajectory=torch.randint(5, (len(index),), generator=generator).int(),
        weight=column().abs(),
        advantage=column(),
        sampling_logprob=column(dtype=torch.float32) - 2,
        old_logprob=column(dtype=torch.float32) - 2 if with_old else None,
        ref_logprob=column(dtype=torch.float32) - 2,
        group=torch.zeros(5, dtype=torch.int32),
        reward=None,
        temperature=torch.rand(len(tokens), generator=generator) + 0.5 if tempered else None,
        edge_factor=column().abs(),
    )


@given(
    st.integers(2, 40), st.sampled_from(OBJECTIVES), st.booleans(), st.booleans(), st.sampled_from([1, 3, 7, 100]),
    st.sampled_from([LogitMap(), LogitMap(0.5, 2.0)]), st.integers(0, 999),
)  # fmt: skip
def test_gradients_of_the_forward_pass_are_those_of_the_loss_through_log_probabilities(
    length: int, objective: Objective, tempered: bool, with_old: bool, chunk: int, logit_map: LogitMap, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs, parent = random_head(generator, length), random_tree(generator, length)
    hidden, weight, bias = inputs
    input_ids = torch.randint(VOCABULARY, (length,), generator=generator)
    terms = random_terms(generator, torch.arange(1, length), tempered=tempered, with_old=with_old)
    factors = torch.rand(5, generator=generator, dtype=torch.float64)
    temperature = 1.0 if terms.temperature is None else terms.temperature
    layer, targets = OutputLayer(weight, bias, logit_map), (terms.tokens, input_ids, parent)
    scores = tree_logprobs(hidden, layer, targets, temperature=temperature)
    expected, expected_sums = objective_loss(*scores, terms, factors, objective)
    exact = torch.autograd.grad(expected, inputs)

    weighed = weigh_terms(terms, objective)
    loss, numbers = priced_terms(
        hidden,
        layer,
        targets,
        lambda order: prices_of_terms(weighed, factors, objective, order, chunk=chunk, term_chunk=5),
        temperature=temperature,
        chunk=chunk,
    )
    sums = name_sums(weighed, numbers[:-1], objective)
    torch.testing.assert_close(numbers[-1], expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    assert list(sums) == list(expected_sums)
    for name, value in sums.items():
        torch.testing.assert_close(value, expected_sums[name], rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(torch.autograd.grad(loss, inputs), exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(1, 8))
def test_every_target_is_in_one_chunk_with_the_state_that_predicts_it(sources: list[int], chunk: int) -> None:
    states, labels = torch.tensor(sources), torch.arange(len(sources)) + 100
    order, chunks = split_targets(states, labels, labels * 0.5, chunk)
    assert torch.equal(order[invert(order)], torch.arange(len(sources)))
    assert torch.equal(torch.cat([each.labels for each in chunks]), labels[order])
    assert torch.equal(torch.cat([each.states[each.rows] for each in chunks]), states[order])
    for each in chunks:
        assert len(each.labels) <= chunk
        assert bool((each.states.diff() > 0).all()), "each state once, ascending"
        assert each.rows.bincount(minlength=len(each.states)).equal(each.first.diff())
        assert each.temperature is not None
        assert each.temperature.equal(each.labels * 0.5)


def small_loss() -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = random_head(generator, 9)
    targets = torch.randint(VOCABULARY, (9,), generator=generator), random_tree(generator, 9), torch.ones(9).double()
    targets[2][0] = 0
    return weighted_nll(hidden, OutputLayer(weight, bias), targets, chunk=4), (hidden, weight, bias)


def test_a_factor_behind_the_loss_scales_its_gradients() -> None:
    loss, inputs = small_loss()
    exact = torch.autograd.grad(loss, inputs)
    loss, inputs = small_loss()
    for ours, theirs in zip(torch.autograd.grad(loss / -7, inputs), exact, strict=True):
        torch.testing.assert_close(ours, theirs / -7, rtol=1e-12, atol=1e-14)


def test_a_second_backward_pass_is_refused() -> None:
    loss, inputs = small_loss()
    torch.autograd.grad(loss, inputs, retain_graph=True)
    assert "compute the loss again" in refusal(torch.autograd.grad, loss, inputs)


def test_second_derivatives_are_refused() -> None:
    loss, inputs = small_loss()
    assert "create_graph" in refusal(torch.autograd.grad, loss, inputs, create_graph=True)
    hidden, weight, _ = inputs
    targets = torch.tensor([1, 2]), torch.arange(9), torch.arange(9) - 1
    logprobs, entropies = tree_logprobs(hidden, OutputLayer(weight), targets)
    assert "create_graph" in refusal(torch.autograd.grad, (logprobs + entropies).sum(), inputs[:2], create_graph=True)


def test_a_row_without_targets_has_gradients_of_0_for_states_weight_and_bias() -> None:
    inputs = random_head(torch.Generator().manual_seed(0), 3)
    hidden, weight, bias = inputs
    targets = torch.arange(3), torch.arange(3) - 1, torch.zeros(3)
    loss = weighted_nll(hidden, OutputLayer(weight, bias), targets)
    assert loss.item() == 0
    for gradient, tensor in zip(torch.autograd.grad(loss, inputs), inputs, strict=True):
        assert gradient.equal(torch.zeros_like(tensor))


def test_a_weight_that_requires_a_gradient_is_refused() -> None:
    hidden, weight, _ = random_head(torch.Generator().manual_seed(0), 3)
    ids, parent = torch.arange(3), torch.arange(3) - 1
    assert "detach it" in refusal(
        weighted_nll, hidden, OutputLayer(weight), (ids, parent, torch.tensor([0.0, 1.0, 1.0], requires_grad=True))
    )


def test_a_frozen_output_layer_gets_no_gradient_and_no_product() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, _ = random_head(generator, 9)
    targets = torch.randint(VOCABULARY, (9,), generator=generator), random_tree(generator, 9), torch.ones(9).double()
    targets[2][0] = 0
    (exact,) = torch.autograd.grad(weighted_nll(hidden, OutputLayer(weight), targets), hidden)
    with Peak() as peak:
        (ours,) = torch.autograd.grad(weighted_nll(hidden, OutputLayer(weight.detach()), targets), hidden)
    torch.testing.assert_close(ours, exact)
    assert peak.products == 2


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default)


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count matrix products, casts of large tensors, and the maximum bytes of tensors that lived at the same time."""

    def __init__(self, large: int = 1 << 60) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products, self.casts, self.bytes, self.large = 0, 0, 0, large
        self._alive: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func in PRODUCTS
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.casts += func is torch.ops.aten._to_copy.default and tensor.numel() >= self.large
                storage = tensor.untyped_storage()
                self._alive[storage] = storage.nbytes()
        self.bytes = max(self.bytes, sum(self._alive.values()))
        return out


def test_logits_are_computed_once_and_the_weight_is_cast_once_for_all_chunks_and_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    length, chunk, words = 65, 16, 300
    hidden = torch.randn(length, HIDDEN, generator=generator, requires_grad=True)
    weight = nn.Parameter(torch.randn(words, HIDDEN, generator=generator))
    targets = torch.randint(words, (length,), generator=generator), torch.arange(length) - 1, torch.ones(length)
    targets[2][0] = 0
    with Peak(large=words * HIDDEN) as peak, cast_once():
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = weighted_nll(hidden, OutputLayer(weight), targets, chunk=chunk)
            torch.autograd.backward(loss)
    assert peak.products == 2 * 3 * math.ceil((length - 1) / chunk)
    # The weight to bfloat16. The rest are chunks of logits, to float32, and products that are added to the sum.
    logits = sum(2 * (min(chunk, length - 1 - begin) * words >= peak.large) for begin in range(0, length - 1, chunk))
    assert peak.casts - 2 * logits == 1


def test_a_chunk_needs_the_memory_of_its_logits_once_beside_one_sum_of_the_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    length, chunk, words, size = 65, 16, 4000, 16
    hidden = torch.randn(length, size, generator=generator, requires_grad=True)
    weight = nn.Parameter(torch.randn(words, size, generator=generator))
    targets = torch.randint(words, (length,), generator=generator), torch.arange(length) - 1, torch.ones(length)
    targets[2][0] = 0
    with Peak() as peak:
        torch.autograd.backward(weighted_nll(hidden, OutputLayer(weight), targets, chunk=chunk))
    logits, layer = 4 * chunk * words, 4 * words * size
    # The weight, its gradient, and the logits of a chunk; states and numbers of tokens are far smaller than these.
    assert 2 * layer + logits < peak.bytes < 2 * layer + logits + logits / 4


def test_float16_keeps_the_slopes_of_a_step_with_many_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    length = 40
    hidden, weight, bias = (each.detach().float().requires_grad_() for each in random_head(generator, length))
    input_ids, parent = torch.randint(VOCABULARY, (length,), generator=generator), random_tree(generator, length)
    terms = random_terms(generator, torch.arange(1, length), tempered=False, with_old=False)
    objective = choose_objective("grpo")
    part = TermObjective(
        objective=objective,
        terms=terms,
        factors=torch.full((5,), 1e-7, dtype=torch.float64),
        targets=(terms.tokens, input_ids, parent),
        temperature=1.0,
        chunk=16,
    )
    loaded: Any = None  # which only objectives with values read
    layer = OutputLayer(weight, bias, LogitMap())
    exact = torch.autograd.grad(part.loss(loaded, hidden, layer)[0], [hidden, weight, bias])
    with torch.autocast("cpu", torch.float16):
        loss = part.loss(loaded, hidden, layer).loss
    # As torch.amp.GradScaler does.
    for ours, theirs in zip(torch.autograd.grad(loss * 2**16, [hidden, weight, bias]), exact, strict=True):
        assert (ours / 2**16 - theirs).norm() < 0.01 * theirs.norm()

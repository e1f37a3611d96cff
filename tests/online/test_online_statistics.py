"""Values and gradients of a batch equal those of every sequence alone, with one row in memory at a time."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.oracle_model import gradients, tiny_model, worst_error
from support.oracle_online import FORMS, MemoryBatch, as_lists, each_alone, in_form, random_batches
from treepack.attention import register
from treepack.errors import TreepackError
from treepack.model.loaded import LoadedModel
from treepack.online import OnlineOptions, batch_statistics, plan_batch, row_statistics, tree_logprobs_like

# 1 2 3 4 5 and its duplicate, 1 2 6, its prefix 1 2, a second tree, one token, none
SEQUENCES = [[1, 2, 3, 4, 5], [1, 2, 6], [7, 8], [1, 2], [1, 2, 3, 4, 5], [9], [], [1, 2, 3, 7, 7, 7]]
BATCH = MemoryBatch(SEQUENCES, [[True] * len(each) for each in SEQUENCES])
LISTS = [torch.tensor(each, dtype=torch.int64) for each in SEQUENCES]
ROWS = OnlineOptions(capacity=4)  # several rows, some with one sequence that is too long


def tree_model(kind: str = "qwen3", **options: Any) -> Any:
    register()
    return tiny_model(kind, attention="treepack_reference", **options)


def loss_of(logprobs: list[Tensor], entropies: list[Tensor] | None) -> Tensor:
    """A loss in which every value has another factor."""
    total = torch.zeros((), dtype=torch.float64)
    factor = 1.0
    for i, values in enumerate(logprobs):
        factors = factor + torch.arange(len(values), dtype=torch.float64).cos()
        total = total + (factors * values).sum()
        if entropies is not None:
            total = total + (factors.sin() * entropies[i]).sum()
        factor += 0.7
    return total


def backward(loss: Tensor) -> None:
    if loss.requires_grad:  # no sequence, no graph
        torch.autograd.backward(loss)


@settings(max_examples=25)
@given(
    batch=random_batches(),
    form=st.sampled_from(FORMS),
    capacity=st.sampled_from([1, 6, None]),
    recompute=st.booleans(),
    kind=st.sampled_from(["qwen3", "gpt2"]),
    data=st.data(),
)
def test_values_and_gradients_are_those_of_every_sequence_alone(
    batch: MemoryBatch, form: str, capacity: int | None, recompute: bool, kind: str, data: st.DataObject
) -> None:
    one = st.sampled_from([0.6, 0.9, 1.0, 1.3])  # float32 has none of these but 1
    temperature: Any = data.draw(one)
    of_tokens = temperature
    if data.draw(st.booleans()):
        temperature = [data.draw(st.lists(one, min_size=len(s), max_size=len(s))) for s in batch.sequences]
        of_tokens, _ = in_form(temperature, form, fill=0.0, dtype=torch.float64)
    alone = tiny_model(kind)
    expected = each_alone(alone, batch, temperature)
    backward(loss_of(*expected))
    model = tree_model(kind)
    ids, mask = in_form(batch.sequences, form, fill=0, dtype=torch.int64)
    scored, _ = in_form(batch.scored, form, fill=False, dtype=torch.bool)
    options = OnlineOptions(capacity=capacity, recompute=recompute, chunk=3)
    found = tree_logprobs_like(model, ids, mask, scored, options, temperature=of_tokens)
    logprobs, entropies = (as_lists(values, mask) for values in found)
    backward(loss_of(logprobs, entropies))
    for values, wanted in ((logprobs, expected[0]), (entropies, expected[1])):
        for value, want in zip(values, wanted, strict=True):
            torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-11)
    assert worst_error(gradients(model), gradients(alone)) < 1e-9


def test_one_planned_batch_serves_every_pass_and_every_epoch() -> None:
    batch, model, reference = plan_batch(LISTS, options=ROWS, temperature=0.5), tree_model(), tree_model("llama")
    with torch.no_grad():
        old, _ = batch_statistics(model, batch)
        of_reference, none = batch_statistics(reference, batch, OnlineOptions(with_entropies=False))
    assert none is None
    assert not old[0].requires_grad
    first, _ = each_alone(tiny_model("qwen3"), BATCH, 0.5)
    other, _ = each_alone(tiny_model("llama"), BATCH, 0.5)
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip([*old, *of_reference], [*first, *other], strict=True))
    gradient: list[dict[str, Tensor]] = []
    for _ in range(2):  # epochs
        model.zero_grad()
        logprobs, entropies = batch_statistics(model, batch)
        assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(logprobs, old, strict=True))
        torch.autograd.backward(loss_of(logprobs, entropies))
        gradient.append(gradients(model))
    assert worst_error(*gradient) < 1e-12


def test_gradients_of_rows_that_a_trainer_accumulates_add_up() -> None:
    whole, by_row = tree_model(), tree_model()
    batch = plan_batch(LISTS, options=ROWS)
    weights = torch.arange(batch.form.size, dtype=torch.float64).cos()
    logprobs, _ = batch_statistics(whole, batch, ROWS)
    torch.autograd.backward((torch.cat(logprobs) * weights).sum())
    for i in range(len(batch.rows) + 1):  # and one row of padding
        values, _ = row_statistics(by_row, batch, i, ROWS)
        places = batch.row_places(i) if i < len(batch.rows) else torch.zeros(0, dtype=torch.int64)
        terms = batch.rows[i].terms if i < len(batch.rows) else None
        index = torch.zeros(0, dtype=torch.int64) if terms is None else terms.index
        torch.autograd.backward((values[index] * weights[places]).sum())
    assert worst_error(gradients(by_row), gradients(whole)) < 1e-12


def test_batches_without_scored_tokens_or_sequences_give_gradients_of_zero() -> None:
    for ids in (torch.zeros(0, 4, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([[5], [5]])):
        model = tree_model()
        logprobs, entropies = tree_logprobs_like(model, ids)
        assert logprobs.shape == entropies.shape == ids.shape
        torch.autograd.backward(logprobs.sum() + entropies.sum())
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_entropies_that_are_not_wanted_are_none() -> None:
    model = tree_model()
    logprobs, entropies = tree_logprobs_like(model, LISTS, options=replace(ROWS, with_entropies=False))
    torch.autograd.backward(loss_of(logprobs, None))
    alone = tiny_model("qwen3")
    torch.autograd.backward(loss_of(each_alone(alone, BATCH)[0], None))
    assert entropies is None
    assert worst_error(gradients(model), gradients(alone)) < 1e-9


def test_a_second_backward_pass_is_refused() -> None:
    logprobs, _ = tree_logprobs_like(tree_model(), LISTS, options=ROWS)
    loss = torch.cat(logprobs).sum()
    torch.autograd.backward(loss, retain_graph=True)
    with pytest.raises(TreepackError, match=r"batch_statistics: backward ran a second time"):
        torch.autograd.backward(loss)


@pytest.mark.parametrize("inside", [True, False], ids=["first batch", "later batch"])
def test_rows_are_computed_again_in_the_precision_of_autocast(inside: bool) -> None:
    """One row and several rows differ only in rounding, and weights that autocast converted get their gradients."""
    results = []
    for options in (OnlineOptions(), ROWS):
        model = tree_model(dtype=torch.float32)
        if not inside:
            with torch.no_grad():
                tree_logprobs_like(model, LISTS)
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, entropies = tree_logprobs_like(model, LISTS, options=options)
        torch.autograd.backward(loss_of(logprobs, entropies))
        results.append(gradients(model))
    exact = tree_model(dtype=torch.float32)
    torch.autograd.backward(loss_of(*tree_logprobs_like(exact, LISTS)))
    # bfloat16 rounds to 2**-9 = 0.002. Rows that were computed again in float32 would differ from the one row by as
    # much as both differ from the exact gradients.
    rounding = worst_error(results[0], gradients(exact))
    assert 1e-3 < rounding < 0.1
    assert worst_error(results[1], gradients(exact)) < 0.1


def test_gradient_checkpointing_changes_nothing() -> None:
    plain, saving = tree_model(), tree_model()
    saving.train()
    saving.gradient_checkpointing_enable()
    for model in (plain, saving):
        torch.autograd.backward(loss_of(*tree_logprobs_like(model, LISTS, options=ROWS)))
    assert worst_error(gradients(saving), gradients(plain)) < 1e-9


@pytest.mark.parametrize("options", [OnlineOptions(), ROWS])
def test_ids_outside_the_vocabulary_are_refused_before_the_model_runs(options: OnlineOptions) -> None:
    model = tree_model()
    size = model.get_input_embeddings().num_embeddings
    tree_logprobs_like(model, [torch.tensor([1, size - 1])], options=options)
    message = rf"^Qwen3ForCausalLM: the batch contains the token id {size}, and the vocabulary ends at {size - 1}; use"
    for wrapped in (model, torch.nn.Sequential(model)):
        with pytest.raises(TreepackError, match=message):
            tree_logprobs_like(wrapped, [torch.tensor([1, 2]), torch.tensor([1, size])], options=options)


def test_ids_outside_of_a_smaller_output_layer_are_refused() -> None:
    model = tree_model()
    model.lm_head = torch.nn.Linear(model.lm_head.in_features, 5, bias=False, dtype=torch.float64)
    with pytest.raises(TreepackError, match="contains the token id 5, and the vocabulary ends at 4;"):
        tree_logprobs_like(model, [torch.tensor([1, 5])])


def test_what_is_no_model_is_refused() -> None:
    loaded = LoadedModel(tree_model(), "tiny", "reference", ())
    with pytest.raises(TreepackError, match="tree_logprobs_like: model has the type LoadedModel; expected Module; use"):
        tree_logprobs_like(loaded, [torch.tensor([1, 2])])


def test_a_model_with_dropout_is_refused() -> None:
    model = tree_model("gpt2")
    model.transformer.drop.p = 0.1
    model.train()
    with pytest.raises(TreepackError, match=r"transformer.drop has a dropout of 0.1 in training mode"):
        tree_logprobs_like(model, LISTS)


class SavedBytes:
    """Count the bytes of activations that autograd holds, and the maximum so far."""

    def __init__(self, model: Any) -> None:
        self.now = self.peak = 0
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def __enter__(self) -> SavedBytes:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda held: held.tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self.hooks.__exit__()

    def pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() not in self.weights:
            self.add(tensor.nbytes)
        held = Held(tensor)
        if tensor.untyped_storage().data_ptr() not in self.weights:
            weakref.finalize(held, self.add, -tensor.nbytes)
        return held

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


class Held:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_eight_rows_need_the_memory_of_one() -> None:
    def peak(num: int, recompute: bool) -> int:
        model = tree_model()
        tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 50, (num, 40)))
        tokens[:, 0] = torch.arange(num)  # no prefix is shared, so each sequence is a row of 40 tokens
        options = OnlineOptions(capacity=40, recompute=recompute)
        tree_logprobs_like(model, tokens, options=options)  # the checks of a first batch
        with SavedBytes(model) as saved:
            logprobs, entropies = tree_logprobs_like(model, tokens, options=options)
            torch.autograd.backward(loss_of(list(logprobs), list(entropies)))
        assert saved.now == 0
        return saved.peak

    one = peak(1, recompute=True)
    assert one > 50_000
    assert peak(8, recompute=True) < 1.1 * one
    assert peak(8, recompute=False) > 7 * one


def test_no_graph_is_kept_without_gradients() -> None:
    model = tree_model()
    for context, frozen in ((torch.no_grad(), False), (nullcontext(), True)):
        model.requires_grad_(not frozen)
        with context:
            logprobs, entropies = tree_logprobs_like(model, LISTS, options=ROWS)
        assert not any(each.requires_grad for each in [*logprobs, *entropies])

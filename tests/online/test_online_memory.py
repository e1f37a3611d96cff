"""A batch in memory whose rows are too long for the memory has the same values and gradients in smaller rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.oracle_model import gradients, tiny_model, worst_error
from support.oracle_online import MemoryBatch, each_alone, random_batches
from treepack.attention import register
from treepack.errors import TreepackError
from treepack.fit import rung
from treepack.online import OnlineOptions, row_run, statistics, tree_logprobs_like

SEQUENCES = [[1, 2, 3, 4, 5], [1, 2, 6], [7, 8], [1, 2], [1, 2, 3, 4, 5], [9], [], [1, 2, 3, 7, 7, 7], [7, 8, 8, 8]]
LISTS = [torch.tensor(each, dtype=torch.int64) for each in SEQUENCES]


def tree_model(kind: str = "qwen3") -> Any:
    register()
    return tiny_model(kind, attention="treepack_reference")


def layers_of(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def loss_of(logprobs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    values = torch.cat([torch.zeros(0, dtype=torch.float64), *logprobs, *entropies])
    return (values * torch.arange(1.0, len(values) + 1, dtype=torch.float64).cos()).sum()


def backward(loss: Tensor) -> None:
    if loss.requires_grad:
        torch.autograd.backward(loss)


class Shortage:
    """Memory for passes of `limit` tokens: longer ones fail in the forward or in the backward pass of a layer."""

    def __init__(self, model: Any, limit: int, place: str) -> None:
        self.limit, self.place, self.sizes = limit, place, list[int]()
        self.hook = layers_of(model)[0].register_forward_hook(self)

    def __call__(self, _: Any, __: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        self.sizes.append(states.shape[1])
        if self.place == "forward" or (self.place == "graph" and states.requires_grad):
            self.check(states)
        if self.place == "backward" and states.requires_grad:
            states.register_hook(self.check)

    def check(self, states: Tensor) -> None:
        if states.shape[1] > self.limit:
            raise torch.OutOfMemoryError("no memory")


def loss_pair(kind: str, batch: MemoryBatch) -> tuple[Any, tuple[list[Tensor], list[Tensor]]]:
    """Return the plain model with the gradients of two batches, and the values of the second one."""
    alone = tiny_model(kind)
    backward(loss_of(*each_alone(alone, MemoryBatch(SEQUENCES, [[True] * len(each) for each in SEQUENCES]))))
    expected = each_alone(alone, batch)
    backward(loss_of(*expected))
    return alone, expected


def check(
    kind: str, batch: MemoryBatch, place: str, options: OnlineOptions, limit: int, *, guarded: bool = False
) -> list[int]:
    """Compare a batch, after another one, with every sequence alone; return the sizes of its passes.

    If `guarded`, the graph of a batch of one row is not the caller's, as on a GPU.
    """
    alone, expected = loss_pair(kind, batch)
    model = tree_model(kind)
    backward(loss_of(*tree_logprobs_like(model, LISTS)))
    shortage = Shortage(model, limit, place)
    ids = [torch.tensor(each, dtype=torch.int64) for each in batch.sequences]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_is_guarded", lambda *_: guarded)
        found = tree_logprobs_like(model, ids, None, [torch.tensor(each) for each in batch.scored], options)
        backward(loss_of(*found))
    shortage.hook.remove()
    for values, wanted in zip(found, expected, strict=True):
        for value, want in zip(values, wanted, strict=True):
            torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-11)
    assert worst_error(gradients(model), gradients(alone)) < 1e-9
    return shortage.sizes


PLACES = ["forward", "graph"]


@pytest.mark.parametrize("place", PLACES)
def test_rows_that_do_not_fit_run_as_rows_of_fewer_sequences(place: str) -> None:
    batch = MemoryBatch(SEQUENCES, [[True] * len(each) for each in SEQUENCES])
    sizes = check("qwen3", batch, place, OnlineOptions(chunk=3), 6)
    assert sizes[0] == 14  # the tokens of the trie
    assert min(sizes) <= 6 < max(sizes)


@pytest.mark.parametrize(("place", "kind"), [("forward", "qwen3"), ("graph", "gpt2")])
def test_a_sequence_that_does_not_fit_alone_runs_in_pieces(
    place: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rung, "SMALLEST_PIECE", 1)
    monkeypatch.setattr(rung, "smaller_piece", lambda tokens: tokens // 2)
    monkeypatch.setattr(row_run, "_CHECKED", 2)
    batch = MemoryBatch(SEQUENCES, [[True] * len(each) for each in SEQUENCES])
    sizes = check(kind, batch, place, OnlineOptions(chunk=3), 3)
    assert max(sizes) == 14  # the tokens of the trie
    assert sizes[-1] <= 3


@settings(max_examples=8, deadline=None)
@given(
    batch=random_batches(),
    capacity=st.sampled_from([6, None]),
    place=st.sampled_from(PLACES),
    recompute=st.booleans(),
    guarded=st.booleans(),
    kind=st.sampled_from(["qwen3", "gpt2"]),
)
def test_values_and_gradients_in_smaller_rows_are_those_of_every_sequence_alone(
    batch: MemoryBatch, capacity: int | None, place: str, recompute: bool, guarded: bool, kind: str
) -> None:
    options = OnlineOptions(capacity=capacity, recompute=recompute, chunk=3)
    longest = max([1, *map(len, batch.sequences)])  # a row without tokens has one of padding
    check(kind, batch, place, options, longest, guarded=guarded)


def test_a_length_that_did_not_fit_is_cut_beforehand_in_later_batches() -> None:
    model = tree_model()
    tree_logprobs_like(model, LISTS)
    shortage = Shortage(model, 6, "forward")
    for expected in (True, False):
        shortage.sizes.clear()
        with torch.no_grad():
            tree_logprobs_like(model, LISTS)
        assert (max(shortage.sizes) > 6) is expected


@pytest.mark.parametrize(
    ("lists", "remedy"),
    [(LISTS, r"set OnlineOptions\(capacity=[34]\)"), (LISTS[:1], "switch gradient checkpointing on, or truncate")],
)
def test_a_backward_pass_that_does_not_fit_names_a_smaller_capacity(
    lists: list[Tensor], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "_is_guarded", lambda *_: True)  # as on a GPU
    model = tree_model()
    shortage = Shortage(model, 4, "backward")
    found = tree_logprobs_like(model, lists, options=OnlineOptions(capacity=8))
    with pytest.raises(
        TreepackError,
        match=rf"^out of memory in the backward pass of a row of [5-8] tokens, and \S+ GiB are free; "
        rf"drop the gradients, to which a part of the row's is added, and {remedy}",
    ):
        backward(loss_of(*found))
    assert max(shortage.sizes) > 4


@pytest.mark.parametrize("reason", ["hooks", "checkpoints"])
def test_a_sequence_runs_in_pieces_only_if_nothing_acts_on_gradients_or_adds_to_them_twice(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rung, "SMALLEST_PIECE", 1)
    monkeypatch.setattr(row_run, "_CHECKED", 2)
    model = tree_model()
    if reason == "hooks":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: None)
    else:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    tree_logprobs_like(model, LISTS)
    Shortage(model, 4, "forward")
    with pytest.raises(TreepackError, match=r"with the smallest plan \(whole rows"):
        tree_logprobs_like(model, LISTS[:1])


def test_a_sequence_that_does_not_fit_alone_is_refused_with_its_length() -> None:
    model = tree_model()
    tree_logprobs_like(model, LISTS)
    Shortage(model, 4, "forward")
    with pytest.raises(
        TreepackError,
        match=r"^out of memory in a row of 5 tokens with the smallest plan \(whole rows, passes of 5 tokens, logits",
    ):
        tree_logprobs_like(model, LISTS[:1])

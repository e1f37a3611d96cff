"""Rows in pieces give equal bits whatever waits in host memory, and touch nothing that is freed or on its way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.oracle_model import Sample, alone, gradients, make_row, sample_sets, tiny_model
from support.packed_gradients import assert_equal
from treepack.attention import IMPLEMENTATIONS, register
from treepack.carry.backward import CarryOptions, RowsInPieces, backward_row
from treepack.carry.offload import CarryBudget, CarryMemory, LayerShape
from treepack.carry.outputs import PieceOutputs
from treepack.carry.pieces import PiecePass, local_ends, plan_row
from treepack.carry.stack import CarriedStack, num_offloaded
from treepack.data.batch import Batch, make_batch
from treepack.memory.host_pages import HostCopies, PageCopies, PagePool, copy_back, copy_out
from treepack.model.layers import checkpoint_layers
from treepack.model.loaded import LoadedModel
from treepack.objectives.row_numbers import RowResult

LAYERS = 4
LIMIT = 16
CPU = torch.device("cpu")


class LateCopies:
    """Copies on a stream that runs as late as it may: a copy happens when somebody waits for it or for a later one."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._number = 0

    def to_pages(self, flat: Tensor, pages: list[Tensor]) -> int:
        return self._add(lambda: copy_out(flat, pages))

    def to_tensor(self, pages: list[Tensor], flat: Tensor) -> int:
        flat.fill_(255)  # NaN in every floating type, for anyone who reads before the copy
        return self._add(lambda: copy_back(pages, flat))

    def wait(self, event: int) -> None:
        waiting = len(self._waiting) - (self._number - event)
        for copy in self._waiting[: max(0, waiting)]:
            copy()
        del self._waiting[: max(0, waiting)]

    def _add(self, copy: Callable[[], None]) -> int:
        self._waiting.append(copy)
        self._number += 1
        return self._number


@functools.cache
def deep(recomputed: bool) -> LoadedModel:
    register()
    model = tiny_model("qwen3", attention=IMPLEMENTATIONS["reference"], num_hidden_layers=LAYERS)
    if recomputed:
        checkpoint_layers(model)
        model.train()
    return LoadedModel(model, "qwen3", "reference", ())


@functools.cache
def deep_plain() -> Any:
    return tiny_model("qwen3", num_hidden_layers=LAYERS)


def memory_of(budget: CarryBudget, copies: PageCopies, *, page: int = 700) -> CarryMemory:
    memory = CarryMemory(CPU, budget, pages=PagePool(pinned=False, size=page), copies=copies)
    memory.poisons = True
    return memory


def run(
    loaded: LoadedModel, batch: Batch, limit: int, memory: CarryMemory | None
) -> tuple[RowResult, dict[str, Tensor]]:
    loaded.model.zero_grad()
    result = backward_row(loaded, batch, CarryOptions(limit, memory=memory))
    return result, gradients(loaded.model)


# A path of 60 tokens with trunk forks, leaves that hang on it everywhere, and a second tree.
def forked() -> Batch:
    path = [token % 47 for token in range(60)]
    samples = [[*path[:at], 48, at % 40, 3] for at in range(9, 60, 17)]
    samples += [path, path[:30] + list(range(20)), list(range(1, 9)), [*range(1, 20), 40]]
    return make_batch(make_row([Sample(tuple(each), (0.0, *[1.0] * (len(each) - 1))) for each in samples]), multiple=8)


@pytest.mark.parametrize(
    "copies",
    [pytest.param(HostCopies, id="early", marks=pytest.mark.slow), pytest.param(LateCopies, id="late")],
)
@pytest.mark.parametrize(("recomputed", "resident"), [(False, 0), (True, 1)], ids=["kept", "recomputed"])
def test_any_number_of_layers_in_host_memory_gives_equal_bits(
    copies: Callable[[], PageCopies], recomputed: bool, resident: int
) -> None:
    loaded, batch = deep(recomputed), forked()
    expected, grads = on_the_gpu(recomputed)
    size = expected.carried_bytes.gpu // LAYERS
    assert expected.carried_bytes.host == 0
    memory = memory_of(CarryBudget(stack=(resident + 2) * size), copies())
    for _ in range(2):  # the second row uses the pages of the first
        result, again = run(loaded, batch, LIMIT, memory)
        assert torch.equal(result.loss, expected.loss)
        assert all(torch.equal(again[name], grad) for name, grad in grads.items())
        assert result.carried_bytes.gpu == (resident + 2) * size
        assert 0 < result.carried_bytes.host == memory.num_bytes
        assert memory.pages.num_free == memory.pages.count
    value = RowsInPieces(loaded, CarryOptions(LIMIT, memory=memory)).loss(batch)
    torch.testing.assert_close(value.loss, expected.loss, rtol=1e-12, atol=0)
    assert memory.num_bytes == result.carried_bytes.host


@functools.cache
def on_the_gpu(recomputed: bool) -> tuple[RowResult, dict[str, Tensor]]:
    return run(deep(recomputed), forked(), LIMIT, None)


def attend(query: Tensor, keys: Tensor, values: Tensor, ends: Tensor) -> Tensor:
    """Attention that keeps views of `keys` and `values` for its backward, as kernels do, and the reference does not."""
    count = keys.shape[2]
    place = torch.arange(count - query.shape[2], count)[:, None]
    key = torch.arange(count)
    hidden = (key > place) | (place >= ends)
    return torch.softmax((query @ keys.mT).masked_fill(hidden, float("-inf")), -1) @ values


def gradients_of_layers(memory: CarryMemory) -> list[Tensor]:
    """Gradients of the weights of five layers of attention over a row in pieces, each layer with its own stack."""
    batch, heads, width = forked(), 2, 4
    size = heads * width
    ends, parent = batch.subtree_end[: batch.num_tokens].numpy(), batch.parent[: batch.num_tokens].numpy()
    plan = plan_row(ends, parent, LIMIT)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(3, size, size, generator=generator, dtype=torch.float64) for _ in range(5)]
    inputs = torch.randn(batch.num_tokens, size, generator=generator, dtype=torch.float64)
    for weight in weights:
        weight.requires_grad_()
    stack = CarriedStack(plan, memory, num_layers=5, with_gradients=True)
    for each in plan.passes:
        stack.enter(each)
        local = torch.from_numpy(local_ends(ends, plan.order, each))
        with torch.set_grad_enabled(each.kind != "push"):
            states = inputs[plan.order[each.begin : each.end]]
            for layer, weight in enumerate(weights):
                query, key, value = ((states @ w).view(1, -1, heads, width).transpose(1, 2) for w in weight)
                with stack.joined(layer, key, value) as (keys, values):
                    out = attend(query, keys, values, local)
                states = states + out.transpose(1, 2).reshape(-1, size)
        if each.kind != "push":
            torch.autograd.backward((states**2).sum())
        stack.leave()
    found = [weight.grad for weight in weights]
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize("copies", [HostCopies, LateCopies], ids=["early", "late"])
@pytest.mark.parametrize("resident", [0, 2])
def test_graphs_find_their_keys_after_other_layers_have_used_the_buffer(
    copies: Callable[[], PageCopies], resident: int
) -> None:
    everything = memory_of(CarryBudget(), HostCopies())
    expected = gradients_of_layers(everything)
    count = forked().num_tokens
    plan = plan_row(forked().subtree_end[:count].numpy(), forked().parent[:count].numpy(), LIMIT)
    size = LayerShape(2, 4, 4, torch.float64, CPU).num_bytes(plan.places, plan.carried)
    found = gradients_of_layers(memory_of(CarryBudget(stack=(resident + 2) * size), copies()))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@settings(max_examples=6)
@given(
    samples=sample_sets(max_samples=7, max_suffix=9),
    limit=st.sampled_from([1, 3, 7, 20]),
    budget=st.sampled_from([0, 90_000, 170_000]),
    late=st.booleans(),
)
def test_gradients_with_layers_in_host_memory_are_those_of_trajectories_alone(
    samples: list[Sample], limit: int, budget: int, late: bool
) -> None:
    memory = memory_of(CarryBudget(stack=budget), LateCopies() if late else HostCopies())
    result, grads = run(deep(False), make_batch(make_row(samples), multiple=8), limit, memory)
    assert_equal((result.loss.item(), grads), alone(deep_plain(), samples))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1), st.integers(1, 9), st.booleans())
def test_rows_of_host_memory_are_those_that_were_written_last(
    writes: list[tuple[int, int]], width: int, late: bool
) -> None:
    memory = memory_of(CarryBudget(), LateCopies() if late else HostCopies(), page=23)
    rows, expected = memory.rows(width), torch.zeros(64, width, dtype=torch.uint8)
    rows.write(expected.clone(), 0)
    generator = torch.Generator().manual_seed(0)
    for begin, count in writes:
        values = torch.randint(0, 256, (count, width), generator=generator, dtype=torch.uint8)
        rows.write(values, begin)
        expected[begin : begin + count] = values
        found = torch.empty(count + 3, width, dtype=torch.uint8)
        memory.copies.wait(rows.read(found, begin))
        assert torch.equal(found, expected[begin : begin + count + 3])


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 12))
def test_layers_beyond_the_budget_leave_room_for_two_buffers(budget: int, size: int, layers: int) -> None:
    waiting = num_offloaded(budget, size, layers)
    assert 0 <= waiting <= layers
    if waiting == 0:
        assert layers * size <= budget
    elif waiting < layers:
        assert (layers - waiting + 2) * size <= budget < (layers - waiting + 3) * size


@pytest.mark.parametrize("copies", [HostCopies, LateCopies], ids=["early", "late"])
def test_outputs_of_trunk_come_back_from_gpu_or_host_and_else_not_at_all(copies: Callable[[], PageCopies]) -> None:
    layers, heads, width = 3, 2, 4
    size = heads * width * 8
    # Room on the GPU for the layers of 5 tokens, in host memory for the layers of 7, and none for the last piece.
    memory = memory_of(CarryBudget(outputs=5 * layers * size, host_outputs=7 * layers * size), copies())
    outputs = PieceOutputs(memory, layers)
    pieces = [PiecePass("push", 0, 5, 0, ()), PiecePass("push", 5, 12, 128, ()), PiecePass("push", 12, 14, 256, ())]
    values: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for piece in pieces:
        kept = outputs.push(piece)
        for layer in range(layers):
            assert kept.take(layer) is None
            out = torch.randn(1, piece.size, heads, width, dtype=torch.float64).transpose(1, 2)
            values[piece.begin, layer] = out.clone(), torch.randn(1, heads, piece.size)
            kept.store(layer, out, values[piece.begin, layer][1])
        outputs.leave(piece)
    assert outputs.num_bytes.gpu == 5 * layers * size
    assert outputs.num_bytes.host >= 7 * layers * size
    found = [outputs.pop(piece) for piece in pieces]
    assert found[2] is None
    for piece, back in list(zip(pieces, found, strict=True))[:2]:
        assert back is not None
        # A forward pass, and layers that are computed again in the opposite order.
        for layer in (*range(layers), *reversed(range(layers))):
            result = back.take(layer)
            assert result is not None
            for got, expected in zip(result, values[piece.begin, layer], strict=True):
                assert torch.equal(got, expected)
        outputs.leave(PiecePass("pop", piece.begin, piece.end, piece.first, ()))
    assert outputs.num_bytes.gpu == 0

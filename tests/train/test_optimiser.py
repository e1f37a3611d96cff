"""AdamW of a run is one kernel for all parameters, and its updates follow the formula."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from treepack.train.optimiser import make_adamw
from treepack.train.options import TrainOptions

OPTIONS = TrainOptions(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))


def exact(values: Tensor, grads: list[Tensor], *, decay: float) -> Tensor:
    """Return `values` after updates with `grads`, in float64 (Loshchilov and Hutter, 1711.05101, algorithm 2)."""
    values, first, second = values.double(), torch.zeros(()).double(), torch.zeros(()).double()
    for step, grad in enumerate(grads, start=1):
        first = 0.9 * first + 0.1 * grad.double()
        second = 0.95 * second + 0.05 * grad.double() ** 2
        change = first / (1 - 0.9**step) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        values = values - OPTIONS.lr * (change + decay * values)
    return values


def test_updates_are_those_of_the_formula_without_decay_of_vectors() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (5,)]
    starts = [torch.randn(shape, generator=generator) for shape in shapes]
    grads = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4)]
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimiser = make_adamw(parameters, OPTIONS)
    assert [group["fused"] for group in optimiser.param_groups] == [True, True]
    for each in grads:
        for parameter, grad in zip(parameters, each, strict=True):
            parameter.grad = grad
        optimiser.step()
    for i, decay in enumerate((0.1, 0.0)):
        expected = exact(starts[i], [each[i] for each in grads], decay=decay)
        torch.testing.assert_close(parameters[i].detach().double(), expected, rtol=2e-6, atol=2e-7)


def test_the_state_is_that_of_an_unfused_optimiser() -> None:
    parameters = [nn.Parameter(torch.ones(3, 2))]
    ours, theirs = make_adamw(parameters, OPTIONS), torch.optim.AdamW(parameters, fused=False)
    for optimiser in (ours, theirs):
        parameters[0].grad = torch.ones(3, 2)
        optimiser.step()
    states = [optimiser.state_dict()["state"][0] for optimiser in (ours, theirs)]
    assert [{name: (value.shape, value.dtype) for name, value in state.items()} for state in states[:1]] == [
        {name: (value.shape, value.dtype) for name, value in state.items()} for state in states[1:]
    ]
    ours.load_state_dict(theirs.state_dict())  # a checkpoint of either continues
    ours.step()

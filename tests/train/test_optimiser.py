"""AdamW of a run is one kernel for all parameters and follows the formula, also with its moments in host memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from mmap import PAGESIZE
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from support.refusal import refusal
from support.tiny_families import tiny_family, transformers_types
from treepack.memory.host_pages import PageCopies, copies_of, copy_back, copy_out
from treepack.memory.offloaded_adamw import OffloadedAdamW, zeros_in_host
from treepack.train.optimiser import decay_groups, make_adamw, prepare_states
from treepack.train.options import TrainOptions

CPU = torch.device("cpu")
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


class LateCopies:
    """Copies in order that happen when something waits for them, or for a later one: the latest that a GPU may be."""

    def __init__(self) -> None:
        self.coming: list[Callable[[], None]] = []

    def to_pages(self, flat: Tensor, pages: list[Tensor]) -> LateEvent:
        return self._later(partial(copy_out, flat, pages))

    def to_tensor(self, pages: list[Tensor], flat: Tensor) -> LateEvent:
        return self._later(partial(copy_back, pages, flat))

    def wait(self, event: LateEvent) -> None:
        event.synchronize()

    def _later(self, copy: Callable[[], None]) -> LateEvent:
        self.coming.append(copy)
        return LateEvent(self, copy)


@dataclass(frozen=True)
class LateEvent:
    copies: LateCopies
    copy: Callable[[], None]

    def synchronize(self) -> None:
        while self.copy in self.copies.coming:
            self.copies.coming.pop(0)()


def layers() -> nn.Module:
    torch.manual_seed(1)
    # 37 * 53 weights are 16 parts of 128 numbers, the last one shorter; the last layer gets no gradient.
    return nn.ModuleList([nn.Linear(37, 53), nn.Linear(53, 11), nn.Linear(3, 3)])


def gradients(module: nn.Module, step: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(step)
    parameters = list(module.parameters())
    for parameter in parameters[:-2]:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return parameters


@pytest.mark.parametrize("copies", [copies_of, lambda _: LateCopies()])
def test_moments_in_host_memory_change_no_bit(copies: Callable[[torch.device], PageCopies]) -> None:
    plain, other = layers(), layers()
    groups = [{"params": list(other.parameters()), "weight_decay": 0.1}]
    offloaded = OffloadedAdamW(groups, device=CPU, copies=copies, size=512, lr=1e-2, betas=(0.9, 0.95))
    usual = torch.optim.AdamW(plain.parameters(), weight_decay=0.1, lr=1e-2, betas=(0.9, 0.95), fused=True)
    for step in range(4):
        pairs = list(zip(gradients(plain, step), gradients(other, step), strict=True))
        for optimiser in (usual, offloaded):
            optimiser.step()
        for ours, theirs in pairs:
            assert torch.equal(ours, theirs)
            assert usual.state[ours].keys() == offloaded.state[theirs].keys()
            for name, value in usual.state[ours].items():
                assert torch.equal(value, offloaded.state[theirs][name])


def test_either_optimiser_continues_the_state_of_the_other() -> None:
    ends = []
    for kinds in ((False, False), (False, True), (True, False), (True, True)):
        module, state = layers(), None
        for step, offloads in enumerate(kinds):
            parameters = gradients(module, step)
            optimiser = make_adamw(parameters, replace(OPTIONS, offload_optimizer=offloads))
            assert isinstance(optimiser, OffloadedAdamW) == offloads
            if state is not None:
                optimiser.load_state_dict(state)
            prepare_states(optimiser)
            optimiser.step()
            state = copy.deepcopy(optimiser.state_dict())
        ends.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    # On a CPU the kernel rounds the ends of a tensor otherwise, so whole tensors are one part here.
    assert all(torch.equal(ends[0], each) for each in ends[1:])


def test_a_copy_of_a_moment_has_its_own_bytes_alone() -> None:
    parameters = gradients(layers(), 0)
    optimiser = make_adamw(parameters, replace(OPTIONS, offload_optimizer=True))
    prepare_states(optimiser)
    for moment in (optimiser.state[parameters[0]][name] for name in ("exp_avg", "exp_avg_sq")):
        assert copy.deepcopy(moment).untyped_storage().nbytes() == moment.nbytes


def test_memory_that_the_driver_does_not_pin_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, answers = list[int](), [0, 2]

    def register(address: int, *_: int) -> int:
        pinned.append(address)
        return answers.pop(0)

    driver = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.remove)
    monkeypatch.setattr("torch.cuda.cudart", lambda: driver)
    block = zeros_in_host(8, torch.device("cuda"))
    address, part = block.ctypes.data, torch.from_numpy(block[4:])
    assert refusal(zeros_in_host, 8, torch.device("cuda")).startswith(
        "the GPU driver does not pin 0.0 GiB of host memory for the optimiser"
    )
    assert address in pinned
    assert all(each % PAGESIZE == 0 for each in pinned), "small blocks that share a page cannot both be pinned"
    del block
    assert address in pinned
    assert part.tolist() == [0, 0, 0, 0]
    del part  # the driver forgets pages that may become free, because their address may come again
    assert address not in pinned


DECAY = {
    "gpt_oss": ("experts.gate_up_proj_bias experts.down_proj_bias input_layernorm.weight sinks", "experts.down_proj"),
    "cohere": ("q_norm.weight k_norm.weight input_layernorm.weight", "q_proj.weight"),
    "kimi_linear": ("forget_gate.A_log", "experts.gate_up_proj"),
    "jamba": ("mamba.A_log mamba.D conv1d.bias", "mamba.in_proj.weight conv1d.weight"),
    "zamba": ("mamba.A_log mamba.D mamba.dt_proj_bias", "mamba.in_proj.weight"),
    "inkling_text": ("input_layernorm.weight", "embed_tokens.weight"),
}


@pytest.mark.parametrize("kind", DECAY)
def test_biases_norms_and_states_of_any_shape_do_not_decay(kind: str) -> None:
    if kind not in transformers_types():
        pytest.skip(f"this transformers has no {kind}")
    with torch.device("meta"):
        model = tiny_family(kind, use_qk_norm=True) if kind == "cohere" else tiny_family(kind)
    decayed, undecayed = decay_groups(model)
    names = {name for name, _ in model.named_parameters()}
    assert names == {*decayed, *undecayed}
    assert len(names) == len(decayed) + len(undecayed)
    for expected, group in zip(DECAY[kind], (undecayed, decayed), strict=True):
        for ending in expected.split():
            found = [name for name in names if name.endswith(ending)]
            assert found, ending
            assert set(found) <= set(group)


def test_frozen_weights_are_in_no_group() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    model[0].weight.requires_grad_(False)
    assert decay_groups(model) == ([], ["0.bias", "1.weight", "1.bias"])

"""The optimiser of a training run.

model --decay_groups--> names of weights that decay, and of all others: biases, norms, states, vectors
run   --make_optimiser--> AdamW, its 8-bit form, SGD, or Muon beside AdamW, with these groups
optimiser, parameter --prepare_state--> the state that its next update needs

Only AdamW runs over several ranks (`check_optimizer`), and only its moments may be in host memory (`TrainOptions`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from treepack.errors import TreepackError, install_hint
from treepack.memory.offloaded_adamw import OffloadedAdamW
from treepack.train.options import TrainOptions
from treepack.train.run import TrainingRun

# Devices with one kernel for the whole update; elsewhere torch chooses.
_FUSED_DEVICES = {"cpu", "cuda"}

# Weights of any shape that do not decay, by name: biases (experts have them as matrices) and norms (with one row per
# head in some models) as in transformers, and besides them the states and scales of some families.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|[._])norm(\.|$)|(^|\.)(A_log|D|scale)$")


def make_optimiser(run: TrainingRun) -> torch.optim.Optimizer:
    """Return the optimiser of the options over all trained parameters of the run's model.

    Raises:
        TreepackError: Muon gets stacked experts, or no matrix.
    """
    model, options = run.loaded.model, run.options
    trained, (_, undecayed) = dict(model.named_parameters()), decay_groups(model)
    parameters = {name: parameter for name, parameter in trained.items() if parameter.requires_grad}
    without = [trained[name] for name in undecayed]
    if options.optimizer == "adamw":
        return make_adamw(list(parameters.values()), options, undecayed=without)
    if options.optimizer != "muon":
        return _make_other(list(parameters.values()), options, without)
    return _make_muon(run, parameters, without)


def check_optimizer(options: TrainOptions, num_ranks: int) -> None:
    """Refuse an optimiser that needs whole weights on several ranks, or a package that is missing."""
    if options.optimizer == "adamw":
        return
    if num_ranks > 1:
        raise TreepackError(f"--optimizer {options.optimizer} needs whole weights on one rank; on several use adamw")
    if options.optimizer == "adamw8bit" and find_spec("bitsandbytes") is None:
        raise TreepackError(f"--optimizer adamw8bit needs bitsandbytes; {install_hint('bitsandbytes')}")


def decay_groups(model: Any) -> tuple[list[str], list[str]]:
    """Return the names of the trained parameters with weight decay, and of the others.

    Biases, norms and states have none whatever their shape is, and no vector has any.
    """
    groups: tuple[list[str], list[str]] = ([], [])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            module = model.get_submodule(name.rpartition(".")[0])
            # Some embeddings end with a norm, and are named after it.
            is_norm = "Norm" in type(module).__name__ and not isinstance(module, nn.Embedding)
            groups[is_norm or parameter.ndim <= 1 or _UNDECAYED.search(name) is not None].append(name)
    return groups


def prepare_states(optimiser: torch.optim.Optimizer) -> None:
    """Allocate the states that the next update needs, so that it cannot run out of memory halfway."""
    if isinstance(optimiser, OffloadedAdamW):
        optimiser.prepare()
        return
    for place, group, parameter in parameter_places(optimiser):
        if parameter.grad is not None and not optimiser.state[parameter]:
            prepare_state(optimiser, place, group, parameter)


def parameter_places(
    optimiser: torch.optim.Optimizer,
) -> Iterator[tuple[tuple[int, int], dict[str, Any], nn.Parameter]]:
    """Yield (number of the group, number in it), the group, and each parameter, in the order of `state_dict`."""
    for i, group in enumerate(optimiser.param_groups):
        for j, parameter in enumerate(group["params"]):
            yield (i, j), group, parameter


def prepare_state(
    optimiser: torch.optim.Optimizer, place: tuple[int, int], group: dict[str, Any], parameter: nn.Parameter
) -> None:
    """Give a parameter the state that the optimiser makes in its first update: none with SGD."""
    state, in_host = optimiser.state[parameter], isinstance(optimiser, OffloadedAdamW)
    if hasattr(optimiser, "init_state"):  # of bitsandbytes
        try:
            optimiser.init_state(group, parameter, *place)
        except BaseException:  # memory may run out after a part of the state
            del optimiser.state[parameter]
            raise
    elif "ns_steps" in group:
        state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    elif "betas" in group:
        device = parameter.device if group["fused"] and not in_host else None
        step = torch.zeros((), dtype=torch.float32, device=device)
        where = torch.device("cpu") if in_host else None
        first, second = (
            torch.zeros_like(parameter, memory_format=torch.preserve_format, device=where, requires_grad=False)
            for _ in range(2)
        )
        # All at once: memory may run out in between, and a state of a part of them would be taken for a whole one.
        state.update(step=step, exp_avg=first, exp_avg_sq=second)


def make_adamw(
    parameters: Sequence[nn.Parameter], options: TrainOptions, *, undecayed: Collection[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """Return AdamW, without weight decay for `undecayed` and for parameters of one dimension."""
    groups = _groups(parameters, options, undecayed)
    if options.offload_optimizer is True:
        return OffloadedAdamW(groups, device=parameters[0].device, lr=options.lr, betas=options.betas)
    # One kernel reads and writes every number once.
    fused = {parameter.device.type for parameter in parameters} <= _FUSED_DEVICES
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, fused=fused or None)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for matrices and AdamW for all else, as one optimiser with the groups of both."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        """Take the groups of both, which stay theirs: a rate that is set in a group is that of its part."""
        self._parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def step(self, closure: Any = None) -> Any:
        """Update all parameters; `closure` must be None."""
        assert closure is None
        for part in self._parts:
            part.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take loaded groups and states, for both parts too."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        first = len(self._parts[0].param_groups)
        for part, groups in zip(self._parts, (self.param_groups[:first], self.param_groups[first:]), strict=True):
            part.param_groups, part.state = groups, self.state


def _make_other(
    parameters: Sequence[nn.Parameter], options: TrainOptions, undecayed: Collection[nn.Parameter]
) -> torch.optim.Optimizer:
    groups = _groups(parameters, options, undecayed)
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.lr)
    bitsandbytes: Any = import_module("bitsandbytes")
    optimiser: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=options.lr, betas=options.betas)
    return optimiser


def _make_muon(
    run: TrainingRun, parameters: dict[str, nn.Parameter], undecayed: Collection[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return Muon over matrices of layers, with steps as large as AdamW's, and AdamW over embeddings and the rest."""
    model, head = run.loaded.model, run.loaded.causal.get_output_embeddings()
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding) or each is head}
    without = {id(parameter) for parameter in undecayed}
    for name, parameter in parameters.items():
        if parameter.ndim > 2 and ".experts." in name:
            raise TreepackError(
                f"--optimizer muon updates matrices, and {name} has the experts of a layer in one tensor; use adamw"
            )
    matrices = [
        parameter
        for name, parameter in parameters.items()
        if parameter.ndim == 2 and not {id(parameter)} & (tables | without) and ".value_head." not in name
    ]
    if not matrices:
        raise TreepackError("--optimizer muon updates matrices of layers, and this run trains none; use adamw")
    options, chosen = run.options, {id(parameter) for parameter in matrices}
    # Its update has the size of AdamW's with this setting (arXiv 2502.16982), so that one rate fits both parts.
    muon = torch.optim.Muon(matrices, lr=options.lr, weight_decay=options.weight_decay, adjust_lr_fn="match_rms_adamw")
    others = [parameter for parameter in parameters.values() if id(parameter) not in chosen]
    return MuonAndAdamW(muon, make_adamw(others, options, undecayed=undecayed)) if others else muon


def _groups(
    parameters: Sequence[nn.Parameter], options: TrainOptions, undecayed: Collection[nn.Parameter]
) -> list[dict[str, Any]]:
    """Return the groups with and without weight decay: none for `undecayed` and for parameters of one dimension."""
    without = {id(p) for p in (*undecayed, *(p for p in parameters if p.ndim <= 1))}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if id(p) not in without], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if id(p) in without], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]  # a model may have no parameter without decay

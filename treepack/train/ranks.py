"""The processes of one run, one per GPU, as torchrun starts them; or one process alone.

    torchrun --nproc-per-node 8 --no-python treepack train ...     join_ranks() in each of them

Ranks compute different rows of a step and meet in sums: `Ranks.sum` has the same value on all of them. Tensors on the
CPU travel through gloo, those on GPUs through NCCL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from treepack.errors import TreepackError


@dataclass(frozen=True)
class Ranks:
    """This process among the `size` processes of the run; alone, there is no process group."""

    rank: int = 0
    size: int = 1
    grouped: bool = False

    @property
    def leads(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum of the `values` of all ranks, which have equal shapes; the same bits on every rank."""
        if not self.grouped:
            return values
        total = values.clone()
        distributed.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; waits for all, on the CPU, where a rank may write files for long."""
        return bool(self.sum(torch.tensor([int(flag)])).item())

    def lead(self, function: Callable[[], None]) -> None:
        """Have the first rank alone call `function`, and all others wait for it.

        Raises:
            TreepackError: what `function` raised; on other ranks, that it did.
        """
        problem: TreepackError | None = None
        if self.leads:
            try:
                function()
            except TreepackError as error:
                problem = error
        failed = self.any(problem is not None)
        if problem is not None:
            raise problem
        if failed:
            raise TreepackError(f"rank {self.rank} stops because rank 0 did, which says why")


def join_ranks(device: torch.device) -> Ranks:
    """This process's place among those that torchrun started, whose group it joins if nobody has; alone otherwise.

    Raises:
        TreepackError: the other processes cannot be reached.
    """
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not distributed.is_available() or not (distributed.is_initialized() or launched):
        return Ranks()
    if not distributed.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            distributed.init_process_group(backend)
        except (ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise TreepackError(f"the processes of this run cannot meet ({reason}); start them by torchrun") from error
    return Ranks(distributed.get_rank(), distributed.get_world_size(), grouped=True)


def refuse_ranks(what: str) -> None:
    """Refuse to do in each of several processes `what` one process does.

    Raises:
        TreepackError: torchrun started more than one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TreepackError(f"{what} runs in one process; start it without torchrun")


def leave_ranks() -> None:
    """Leave the group that `join_ranks` joined, if any."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" is a GPU if there is one, under torchrun the one of this process.

    Raises:
        TreepackError: if it is neither a CPU nor a GPU that torch sees.
    """
    count = torch.cuda.device_count()
    local = os.environ.get("LOCAL_RANK")
    if name == "auto" or (name == "cuda" and local is not None):
        if count == 0 and name == "auto":
            return torch.device("cpu")
        name = "cuda" if local is None else f"cuda:{local}"
    known = re.fullmatch(r"cpu|cuda(?::([0-9]{1,4}))?", name)
    if known is None:
        raise TreepackError(f"device is {name!r}; expected cpu, cuda or cuda:N")
    if name != "cpu" and int(known[1] or 0) >= count:
        raise TreepackError(f"device is {name!r} and torch sees {count} GPUs; expected one of those, or cpu")
    return torch.device(name)

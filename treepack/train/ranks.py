"""The processes of one run, one per GPU, as torchrun starts them; or one process alone.

    torchrun --nproc-per-node 8 --no-python treepack train ...     each process calls join_ranks()

Ranks compute different rows of a step, and `Ranks.sum` returns the same value on all of them. Tensors on the CPU are
summed by gloo, tensors on GPUs by NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from treepack.errors import TreepackError
from treepack.train.input_checks import check_device_name, check_sequence_ranks

_T = TypeVar("_T")
_JOIN_TIME = timedelta(minutes=10)  # for machines that start one after the other, and read torch from a slow disk


@dataclass(frozen=True)
class Ranks:
    """The place of this process among the `size` processes of the run; `grouped` if there is a process group.

    `machines` is the number of machines, which have equally many ranks, numbered machine by machine; None if the
    launcher has not set it. `sequence` ranks compute the same rows together, each a part of their tokens.
    """

    rank: int = 0
    size: int = 1
    grouped: bool = False
    machines: int | None = None
    sequence: int = 1

    @property
    def leads(self) -> bool:
        """True for the one process that writes files and prints."""
        return self.rank == 0

    @property
    def row_share(self) -> tuple[int, int]:
        """The number of this rank's share of the rows, and the number of shares: 5 of 8 ranks, 2 a row -> 2 of 4."""
        return self.rank // self.sequence, self.size // self.sequence

    @property
    def counts_rows(self) -> bool:
        """True for one of the ranks that compute the same rows: the one that counts them in sums over all ranks."""
        return self.rank % self.sequence == 0

    def sharing(self, sequence: int) -> Ranks:
        """Return the same ranks with every row computed by `sequence` of them.

        Raises:
            TreepackError: their number is not a multiple of it.
        """
        check_sequence_ranks(sequence, self.size, grouped=self.grouped)
        # If the ranks of a row are on several machines, no machine has rows of its own.
        divided = self.machines is None or self.size // sequence % self.machines == 0
        return replace(self, sequence=sequence, machines=self.machines if divided else 1)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the `values` of all ranks, which have equal shapes; the same bits on every rank."""
        if not self.grouped:
            return values
        total = values.clone()  # all_reduce works in place
        distributed.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Return true if `flag` is true on any rank; waits for all ranks."""
        # A tensor on the CPU, which gloo sums, because rank 0 may write files for a long time before it gets here.
        return bool(self.sum(torch.tensor([int(flag)])).item())

    def smallest(self, number: int) -> int:
        """Return the smallest `number` of all ranks."""
        numbers = torch.zeros(self.size, dtype=torch.int64)
        numbers[self.rank] = number
        return int(self.sum(numbers).min())

    def largest(self, number: int) -> int:
        """Return the largest `number` of all ranks."""
        return -self.smallest(-number)

    def lead(self, function: Callable[[], _T]) -> _T:
        """Call `function` on the first rank only, and return its result, which can be pickled, on all ranks.

        Raises:
            TreepackError: on the first rank the error of `function`, on other ranks a reference to it.
        """
        problem: TreepackError | None = None
        result: list[_T | None] = [None]
        if self.leads:
            try:
                result[0] = function()
            except TreepackError as error:
                problem = error
        # The error is raised after the ranks have met: if the first rank left now, the others would wait for ever.
        failed = self.any(problem is not None)
        if problem is not None:
            raise problem
        if failed:
            raise TreepackError(f"rank {self.rank} stops because rank 0 stopped; see the error of rank 0")
        if self.grouped:
            distributed.broadcast_object_list(result, src=0, device=torch.device("cpu"))  # by gloo
        return result[0]  # type: ignore[return-value]

    def require_same(self, values: dict[str, Any]) -> None:
        """Refuse values that are not those of the first rank; all ranks must call this.

        Raises:
            TreepackError: on a rank with other values their names, on the other ranks that there is such a rank.
        """
        first = self.lead(lambda: values)
        different = [f"{name} is {value} and {first[name]}" for name, value in values.items() if value != first[name]]
        if self.any(bool(different)):
            found = f"rank {self.rank} and rank 0 differ: {'; '.join(different)}" if different else "its ranks differ"
            raise TreepackError(f"this is not one run, because {found}; start all ranks with the same command and data")


def join_ranks(device: torch.device) -> Ranks:
    """Join the processes that torchrun started, unless this process already has, and return its place among them.

    Without torchrun the process is alone.

    Raises:
        TreepackError: the other processes cannot be reached, or do not come.
    """
    # torchrun, and other launchers that torch's env:// method supports, set both.
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not distributed.is_available() or not (distributed.is_initialized() or launched):
        return Ranks()
    if not distributed.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # Both on a GPU, because `Ranks.any` sums values that are on the CPU.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            _join_group(backend)
        except (ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise TreepackError(
                f"the ranks of this run cannot connect ({reason}); look for an error of rank 0, and start all of them "
                "with torchrun"
            ) from error
    size = distributed.get_world_size()
    return Ranks(distributed.get_rank(), size, grouped=True, machines=num_machines(size))


def _join_group(backend: str) -> None:
    """Join the process group, after all ranks have come.

    The agent of torchrun ends all ranks if one fails. Other launchers may not, so the wait has an end.

    Raises:
        TreepackError: naming the ranks that did not come.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or host is None or port is None:
        distributed.init_process_group(backend)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options: dict[str, Any] = {"timeout": _JOIN_TIME, "wait_for_workers": False, "multi_tenant": True}
    store = distributed.TCPStore(host, int(port), size, rank == 0, **options)  # type: ignore[attr-defined]
    store.set(f"came/{rank}", "")
    try:
        store.wait([f"came/{each}" for each in range(size)], _JOIN_TIME)
    except distributed.DistStoreError as error:
        missing = [str(each) for each in range(size) if not store.check([f"came/{each}"])]
        raise TreepackError(
            f"{len(missing)} of {size} ranks did not come within {_JOIN_TIME.seconds // 60} minutes: rank "
            f"{', '.join(missing)}; look for their errors, and start all ranks again, with torchrun, which ends all if "
            "one fails"
        ) from error
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)


def join_row_ranks(device: torch.device, sequence: int, command: str) -> Ranks:
    """Join the ranks of a command that computes every row on all of them, `sequence` ranks; 1 for a single process.

    Raises:
        TreepackError: torchrun started another number of processes.
    """
    ranks = join_ranks(device).sharing(sequence)
    if ranks.size != sequence:
        raise TreepackError(
            f"{command} computes every row on all ranks; give --sequence-ranks {ranks.size}, or start it without "
            "torchrun"
        )
    return ranks


def num_machines(size: int) -> int | None:
    """Return the number of machines on which torchrun started `size` processes, None if their numbers differ."""
    # 4 processes with LOCAL_WORLD_SIZE 2: 2 machines
    local = local_processes()
    return size // local if local and size % local == 0 else None


def local_processes() -> int | None:
    """Return the number of processes that torchrun started on this machine; None if the launcher did not set it."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdecimal() and int(local) > 0 else None


def leave_ranks() -> None:
    """Leave the group that `join_ranks` joined, if any."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def find_dtype(name: str, device: torch.device) -> str:
    """Return "fp32" or "bf16": `name`, or for "auto" bf16 on a GPU that has it and fp32 elsewhere."""
    if name != "auto":
        return name
    # Tensor cores take bfloat16 from Ampere (8, 0) on.
    return "bf16" if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"


def find_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is a GPU if there is one, and under torchrun the GPU of this process.

    Raises:
        TreepackError: the name is not that of the CPU or of a GPU that torch sees.
    """
    # With 8 GPUs and LOCAL_RANK 3: auto -> cuda:3, cuda -> cuda:3, cuda:5 -> cuda:5. Without LOCAL_RANK: auto -> cuda.
    count = torch.cuda.device_count()
    local = os.environ.get("LOCAL_RANK")
    if name == "auto" or (name == "cuda" and local is not None):
        if count == 0 and name == "auto":
            return torch.device("cpu")
        name = "cuda" if local is None else f"cuda:{local}"
    check_device_name(name, count)
    return torch.device(name)

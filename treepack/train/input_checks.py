"""Refusals of single values, without torch: the device, the shares of a mixture, rows without terms, the launcher.

`early_checks` makes them before torch is imported, and the code that uses a value makes them again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from treepack.data.packed_header import PackedSource
from treepack.errors import TreepackError, torch_hint

_DEVICE = re.compile(r"auto|cpu|cuda(?::([0-9]{1,4}))?")


def require_torch(command: str) -> None:
    """Refuse a command or function if torch is not installed; imports nothing.

    Raises:
        TreepackError: naming `command` and what to install.
    """
    if find_spec("torch") is None:
        raise TreepackError(f"{command} needs torch, which is not installed; {torch_hint()}")


def refuse_ranks(command: str) -> None:
    """Refuse to run `command`, which runs in one process, in several.

    Raises:
        TreepackError: torchrun started more than one process.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise TreepackError(f"{command} runs in one process; start it without torchrun")


def check_device_name(name: str, num_gpus: int | None) -> None:
    """Refuse a device that is not the CPU, nor one of the GPUs if their number is known.

    Raises:
        TreepackError: no device has this name, or the machine does not have it.
    """
    match = _DEVICE.fullmatch(name)
    if match is None:
        raise TreepackError(f"device is {name!r}; expected cpu, cuda or cuda:N")
    if name.startswith("cuda") and num_gpus is not None and int(match[1] or 0) >= num_gpus:
        raise TreepackError(f"device is {name!r} and torch sees {num_gpus} GPUs; expected one of these GPUs, or cpu")


def check_mix(mix: Sequence[float] | None, num_directories: int) -> None:
    """Refuse shares that are not one for each directory.

    Raises:
        TreepackError: with both numbers.
    """
    if mix is not None and len(mix) != num_directories:
        raise TreepackError(f"mix has {len(mix)} of {num_directories} shares; give one for each packed directory")


def check_shared_rows(path: str | Path, *, has_steps: bool) -> None:
    """Refuse shares of rows that belong to training steps.

    Raises:
        TreepackError: naming the directory.
    """
    if has_steps:
        raise TreepackError(
            f"{path}: rows of training steps keep the order of these steps and cannot be taken in shares; omit --mix, "
            "which trains each step on the rows of all directories"
        )


def check_terms(source: PackedSource) -> None:
    """Refuse rows that have no terms to write log-probabilities for.

    Raises:
        TreepackError: naming the directory.
    """
    if "term_token" not in source.term_columns:
        raise TreepackError(
            f"{source.path}: its rows have no terms to write log-probabilities for; add rewards or advantages and pack"
        )


def check_sequence_ranks(sequence: int, size: int, *, grouped: bool) -> None:
    """Refuse a number of ranks for each row that does not divide the `size` ranks; `grouped` if torchrun started them.

    Raises:
        TreepackError: with both numbers.
    """
    if sequence > 1 and not grouped:
        raise TreepackError(
            f"sequence_ranks is {sequence} and this process is alone; start the ranks with torchrun --nproc-per-node "
            f"{sequence} --no-python treepack ..."
        )
    if size % sequence:
        raise TreepackError(f"sequence_ranks is {sequence} and the run has {size} ranks; start a multiple of it")


def check_expert_ranks(expert: int, size: int, *, grouped: bool) -> None:
    """Refuse a number of ranks for the experts of a layer that does not divide the `size` ranks.

    Raises:
        TreepackError: with both numbers.
    """
    if size % expert:
        run = f"the run has {size} ranks" if grouped else "this is one process"
        raise TreepackError(
            f"expert_ranks is {expert} and {run}; start a multiple of {expert} with torchrun, or leave it out, also "
            "for --verify"
        )


def check_launched(sequence: int, expert: int = 1) -> None:
    """Refuse ranks of a row, or of a layer's experts, that do not divide the processes that torchrun started.

    Raises:
        TreepackError: as `check_sequence_ranks` and `check_expert_ranks`, or WORLD_SIZE is not a number.
    """
    size = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    if size and not size.isdecimal():
        raise TreepackError(f"WORLD_SIZE is {size!r}; expected the number of ranks, so start them with torchrun")
    check_sequence_ranks(sequence, int(size or 1), grouped=bool(size))
    check_expert_ranks(expert, int(size or 1), grouped=bool(size))

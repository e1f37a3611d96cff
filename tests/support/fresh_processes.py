"""Fresh processes that start at once: a server, which did the slow imports before, forks each of them.

The import of torch and transformers takes seconds of a core. The server does it once for all tests of a process.

PROCESSES    multiprocessing's context of that server
run_command  the command line, as the function of such a process
lose_a_rank  one of two ranks, the second of which ends
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "treepack.train.loop",
        "treepack.pack.rows",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "transformers.models.qwen3.modeling_qwen3",
        "hypothesis.strategies",  # what the modules of the tests import takes as long as a test
        "pytest",
    ]
)


def run_command(arguments: list[str], folder: Path, environment: Mapping[str, object] = MappingProxyType({})) -> None:
    """Run `treepack` with `arguments`, and write its output to the files `stdout` and `stderr` of `folder`.

    `environment` has more variables; a forkserver has those of its own start.
    """
    os.environ.update({name: str(value) for name, value in environment.items()})
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv = ["treepack", *arguments]
    (entry,) = entry_points(group="console_scripts", name="treepack")
    entry.load()()


def lose_a_rank(rank: int, folder: Path) -> None:
    """Join two ranks; rank 1 ends, and rank 0 writes the command's sentence about that to the file `sentence`."""
    import torch  # the server has imported it, but tests of the data half have no torch
    from torch import distributed

    tempfile.tempdir = str(folder)
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    distributed.all_reduce(torch.ones(1))
    if rank == 1:
        os._exit(9)
    try:
        distributed.all_reduce(torch.ones(1))
    except Exception as error:
        (folder / "sentence").write_text(import_module("treepack_cli.faults").describe_fault(error))

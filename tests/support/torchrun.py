"""Processes of torchrun: the documented command for several machines, as one for this machine alone, and its ranks."""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "training.md"


def documented_launch(node: int, port: int) -> list[str]:
    """Return the documented command up to `treepack train`, for this machine alone and one process per node."""
    (line,) = [line for line in DOCS.read_text().splitlines() if line.startswith("torchrun --nnodes")]
    line = line.replace("NODE", str(node)).replace("HOST", "127.0.0.1").replace("29500", str(port))
    launch, _, _ = line.replace("--nproc-per-node 8", "--nproc-per-node 1").partition(" treepack train ")
    treepack = Path(sys.executable).parent / "treepack"
    return [sys.executable, "-m", "torch.distributed.run", *shlex.split(launch)[1:], str(treepack), "train"]


def pid_of_rank(rank: int, launcher: int) -> int:
    """Return the process of a rank that torchrun, the process `launcher`, has started on this machine."""
    children = [pid for path in Path(f"/proc/{launcher}/task").glob("*/children") for pid in path.read_text().split()]
    variable = f"RANK={rank}".encode()
    (found,) = [pid for pid in children if variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    return int(found)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port

"""The command of the docs for several machines, as a command for one process per machine on this one."""

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


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port

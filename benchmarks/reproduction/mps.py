"""Share a GPU between processes by NVIDIA's MPS, so that kernels of different processes run at the same time.

    with shared_gpu(wanted=True) as environment:      subprocess.Popen(..., env=os.environ | environment)

Without MPS, processes take turns on a GPU. The server belongs to this program and ends with it; no setting of the GPU
changes. If it cannot be started, or a test process fails with it, that is printed, and `environment` is empty.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

CONTROL = "nvidia-cuda-mps-control"
TEST = "import torch; (torch.ones(9, device='cuda') @ torch.ones(9, device='cuda')).item()"
WAIT = 60  # seconds for the test process


@contextlib.contextmanager
def shared_gpu(*, wanted: bool) -> Iterator[dict[str, str]]:
    """Yield the environment variables of processes that share the GPU; none if it is not wanted or not possible."""
    if not wanted:
        yield {}
        return
    if shutil.which(CONTROL) is None:
        print(f"note: there is no {CONTROL}, so processes take turns on the GPU", file=sys.stderr)
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps", ignore_cleanup_errors=True) as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        fault = _fault([CONTROL, "-d"], variables)
        try:
            fault = fault or _fault([sys.executable, "-c", TEST], variables)
            print(f"MPS: {fault or 'on'}", flush=True)
            yield {} if fault else variables
        finally:
            _fault([CONTROL], variables, "quit\n")


def _fault(command: list[str], variables: dict[str, str], text: str = "") -> str:
    """Run a command, and return why it failed, or nothing."""
    try:
        subprocess.run(
            command,
            input=text.encode(),
            env=os.environ | variables,
            timeout=WAIT,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"off, because {error}"
    return ""

"""A real Ray cluster on this machine: a head, and machines that can be killed; each is a tree of processes.

`ray stop` would end every cluster of this machine, so each machine here is a `ray start --block`, which ends with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUPPORT = Path(__file__).parents[1]
# Other work on this machine may keep a machine of the cluster from answering for a while; it is not dead for that.
SLOW_MACHINE = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "15",
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120",
}
PATIENCE = 120  # seconds; other work on this machine may slow down the start


@contextmanager
def running_cluster(*, workers: int) -> Iterator[tuple[str, str]]:
    """Start a cluster of one machine with `workers` CPUs; yield its HOST:PORT and ray://HOST:PORT."""
    # A folder with a short name: Ray's sockets are in it, and their paths have at most 107 characters.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    port, client_port = free_port(), free_port()
    head = ("--head", f"--port={port}", f"--ray-client-server-port={client_port}", f"--temp-dir={folder}")
    quiet = ("--include-dashboard=false", "--disable-usage-stats")
    try:
        with machine(*head, *quiet, workers=workers, ports=(port, client_port)):
            yield f"127.0.0.1:{port}", f"ray://127.0.0.1:{client_port}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def machine(*arguments: str, workers: int, ports: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Start a machine of a cluster, and wait until its ports answer; end its processes after the block.

    The process leads a process group, which has the daemons and the workers of the machine.
    """
    command = [str(Path(sys.executable).with_name("ray")), "start", *arguments, "--block"]
    command += ["--node-ip-address=127.0.0.1", f"--num-cpus={workers}", f"--object-store-memory={200 << 20}"]
    environment = os.environ | SLOW_MACHINE | {"PYTHONPATH": str(SUPPORT)}  # tasks are functions of support.ray_stages
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            start = time.monotonic()
            while not all(map(answers, ports)):
                if process.poll() is not None or time.monotonic() > start + PATIENCE:
                    output.seek(0)
                    raise AssertionError(f"ray start failed: {output.read().decode(errors='replace')}")
                time.sleep(0.1)
            yield process
        finally:
            process.terminate()
            process.wait(PATIENCE)
            kill(process)


def kill(machine: subprocess.Popen[bytes]) -> None:
    """End all processes of a machine at once, as if its power failed."""
    with suppress(ProcessLookupError):
        os.killpg(machine.pid, signal.SIGKILL)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])

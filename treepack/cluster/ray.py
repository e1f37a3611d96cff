"""Run the tasks of `build-trie` and `pack` on a Ray cluster.

    connected_cluster(address) --> RayScheduler  address: auto, local, HOST:PORT or ray://HOST:PORT

    run       one Ray task for each call, a window of them in flight     results come here in order
    keep      as run; the table stays in Ray's object store              its handle is an ObjectRef

A task whose process or machine dies runs again. If a machine dies with tables that a later task needs, Ray runs the
tasks again that made them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pyarrow as pa

import treepack
from treepack.cluster.scheduler import Call, TableHandle
from treepack.errors import TreepackError, install_hint

# Calls in flight for each worker: the one that runs, the next ones, and finished ones that wait for a slow first one.
WINDOW = 4
# Attempts after the death of the process or machine of a task.
_RETRIES = 3
_GRACE = 5.0  # seconds that tasks in flight have to end after an error
_RECOUNT = 5.0  # seconds after which the CPUs of the cluster are counted again
_TIMEOUT = 30.0  # seconds that a cluster has to answer


class RayScheduler:
    """The `Scheduler` of the cluster that this process is connected to."""

    def __init__(self) -> None:
        """Use the connection of `connected_cluster`, or of the caller's `ray.init`."""
        self._ray = _import_ray()
        self._task = self._ray.remote(_run_in)
        self._folder = os.getcwd()  # noqa: PTH109 (a string)
        self._shared: list[Any] = []
        self._num_cpus, self._counted = 1, float("-inf")

    @property
    def num_workers(self) -> int:
        """Number of CPUs of the cluster, at least one; it follows a cluster that grows."""
        if time.monotonic() > self._counted + _RECOUNT:  # it is asked for at each call, and Ray takes a millisecond
            self._num_cpus = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
            self._counted = time.monotonic()
        return self._num_cpus

    def share(self, value: Any) -> Any:
        """Put `value` into the object store, and return its handle."""
        # Ray cannot make such an object again, and a task that runs again long after needs it.
        self._shared.append(self._ray.put(value))
        return self._shared[-1]

    def run(self, function: Callable[..., Any], calls: Iterable[Call]) -> Iterator[Any]:
        """Yield `function(*call)` for each of `calls`, in their order; see `Scheduler`."""
        return (summary for _, summary in self._results(function, calls, num_returns=1))

    def keep(
        self, function: Callable[..., tuple[pa.Table, Any]], calls: Iterable[Call]
    ) -> Iterator[tuple[TableHandle, Any]]:
        """Yield a handle of the table and the summary of each of `calls`, in their order; see `Scheduler`."""
        return self._results(function, calls, num_returns=2)

    def _results(
        self, function: Callable[..., Any], calls: Iterable[Call], *, num_returns: int
    ) -> Iterator[tuple[TableHandle, Any]]:
        """Yield the first handle and the last result of each call.

        If the caller stops or a task fails, wait a little for the tasks in flight, so that they do not write into a
        folder that is being removed. The end of the connection ends them. `ray.cancel` is not used: if a result comes
        at that moment, it may end this process with a failed check of Ray 2.60.
        """
        rest = iter(calls)
        task = self._task.options(num_returns=num_returns, max_retries=_RETRIES, name=function.__name__)
        in_flight: deque[list[Any]] = deque()
        try:
            while True:
                for call in islice(rest, WINDOW * self.num_workers - len(in_flight)):
                    refs = task.remote(self._folder, function, *call)
                    in_flight.append([refs] if num_returns == 1 else refs)
                if not in_flight:
                    return
                summary = self._value(in_flight[0][-1])
                yield in_flight.popleft()[0], summary
        finally:
            if in_flight:
                with contextlib.suppress(Exception):  # the connection may be gone
                    last = [refs[-1] for refs in in_flight]
                    self._ray.wait(last, num_returns=len(last), timeout=_GRACE, fetch_local=False)

    def _value(self, ref: Any) -> Any:
        """Return the result of a task.

        Raises:
            TreepackError: the task raised it, or its process died several times.
        """
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            while isinstance(cause, self._ray.exceptions.RayTaskError):  # of a task that made an argument
                cause = cause.cause
            if isinstance(cause, TreepackError):
                raise cause from None
            raise
        except self._ray.exceptions.RayError as error:
            raise TreepackError(
                f"Ray could not finish a task, and {_RETRIES} retries failed too ({_cause(error)}); if memory ran "
                "out, give machines with more memory per CPU, or for pack more --partitions"
            ) from error


@contextmanager
def connected_cluster(address: str, *, workers: int = 1) -> Iterator[RayScheduler]:
    """Connect this process to a Ray cluster until the block ends.

    Args:
        address: "auto" for the cluster that runs on this machine or that RAY_ADDRESS names, or that this process is
            connected to; "local" to start one here; HOST:PORT; or ray://HOST:PORT of a Ray Client server.
        workers: CPUs of a cluster that is started here.

    Raises:
        TreepackError: Ray is not installed, no cluster answers, or one of its machines lacks this version of treepack.
    """
    ray = _import_ray()
    is_ours = not (address == "auto" and ray.is_initialized())
    if is_ours:
        _start(ray, address, workers)
    try:
        _check_versions(ray)
        yield RayScheduler()
    finally:
        if is_ours:
            ray.shutdown()


def _import_ray() -> Any:
    # Ray reads these when it is imported: no statistics to its makers, and no hint about GPUs.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray  # imported here, because only runs on a cluster need it
    except ImportError as error:
        raise TreepackError(f"--ray needs Ray, which is not installed; {install_hint('ray')}") from error
    return ray


def _start(ray: Any, address: str, workers: int) -> None:
    """Connect to a cluster or start one, without words on stdout.

    Raises:
        TreepackError: no cluster answers, or it cannot be used.
    """
    if ray.is_initialized():
        raise TreepackError(f"--ray {address}: this process is connected to a Ray cluster already; give auto")
    refuse_unreachable(address)
    # Only a cluster that is started here takes CPUs, and only it may have a dashboard.
    own: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False} if address == "local" else {}
    for is_last in (False, True):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
            return
        except (OSError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
            ray.shutdown()  # else a failed ray:// would send every later call of this process to Ray Client
            # Ray Client starts a process for each client. A cluster under load may not do so in time.
            if isinstance(error, ConnectionAbortedError) and not is_last:
                continue
            raise TreepackError(
                f"--ray {address}: no connection to a Ray cluster ({_cause(error)}); check the address, that "
                "its versions of Ray and Python are those of this machine, and RAY_AUTH_MODE and its token"
            ) from error


def refuse_unreachable(address: str) -> None:
    """Refuse an address that nothing listens at; Ray itself would try for minutes.

    Raises:
        TreepackError: no answer within `_TIMEOUT` seconds, or the address has no port.
    """
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise TreepackError(f"--ray {address}: expected auto, local, HOST:PORT or ray://HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise TreepackError(
            f"--ray {address}: nothing answers there ({error}); check the host and the port, 6379 of the head or "
            "10001 of ray://"
        ) from error


def _check_versions(ray: Any) -> None:
    """Refuse a cluster with a machine that lacks this version of treepack.

    Raises:
        TreepackError: naming the machine.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # A function inside a function is pickled with its code, so that it runs on machines without treepack.
    def version() -> str | None:
        try:
            import treepack
        except ImportError:
            return None
        return str(treepack.__version__)

    probe = ray.remote(version)
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    probes = [
        probe.options(  # no CPU, so that it runs on a busy machine
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
        ).remote()
        for node in nodes
    ]
    try:
        versions = ray.get(probes, timeout=2 * _TIMEOUT)
    except ray.exceptions.RayError as error:
        raise TreepackError(
            f"a machine of the Ray cluster does not run a task ({_cause(error)}); look at `ray status`"
        ) from error
    for node, there in zip(nodes, versions, strict=True):
        if there != treepack.__version__:
            state = "has no treepack" if there is None else f"has treepack {there}"
            raise TreepackError(
                f"the machine {node['NodeManagerHostname']} of the Ray cluster {state}; install treepack "
                f"{treepack.__version__} there, as on this machine"
            )


def _cause(error: BaseException) -> str:
    """Return the first line of an error, and its cause: the next line, or the last one of a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines[0] += f" {lines[-1] if lines[1].startswith('Traceback') else lines[1]}"
    return lines[0].rstrip(".") if lines else type(error).__name__


def _run_in(folder: str, function: Callable[..., Any], *call: Any) -> Any:
    """Run in a task: return `function(*call)`, with relative paths as on the machine of the command."""
    with contextlib.suppress(OSError):  # this machine may have no such folder
        os.chdir(folder)
    # The tasks of a machine are its threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return function(*call)

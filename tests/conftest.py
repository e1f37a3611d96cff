"""Settings of all tests.

One thread per process: the models are tiny and the tests run side by side, so more threads only wait for each other.
Without a GPU, Triton runs kernels in its interpreter; it reads the variable once, when it is first imported.
Hypothesis is derandomised, so that a run is repeatable, and has no deadlines, as machines differ. `make test` tries at
most 8 examples of each property, `make test-slow` 40 or its own number. The slow group leaves out properties whose
own number is at most 8: it would try the same examples again.
"""

import atexit
import gc
import os
import secrets
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import sys
from collections.abc import Generator, Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest
from hypothesis import settings

from support.command_line import Result, Run
from support.ray_cluster import running_cluster
from support.s3 import Store, running_store

EXAMPLES = 8
settings.register_profile("treepack", deadline=None, derandomize=True, max_examples=EXAMPLES)
settings.register_profile("thorough", settings.get_profile("treepack"), max_examples=40)
settings.load_profile("treepack")

SETTINGS = "_hypothesis_internal_use_settings"  # of a property, where Hypothesis reads them

# The environment of `make test-data` has no torch, and macOS has no triton.
MISSING = [name for name in ("torch", "triton") if find_spec(name) is None]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests alike in every worker; give properties their number of examples."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path)
    thorough = config.getoption("--hypothesis-profile") == "thorough"
    repeated = []
    for item in items:
        own: settings | None = getattr(getattr(item, "obj", None), SETTINGS, None)
        if own is None or item.get_closest_marker("slow") is not None:
            continue
        if thorough and own.max_examples <= EXAMPLES:
            repeated.append(item)
        elif not thorough and own.max_examples > EXAMPLES:
            setattr(item.obj, SETTINGS, settings(own, max_examples=EXAMPLES))  # type: ignore[attr-defined]
    config.hook.pytest_deselected(items=repeated)
    items[:] = [item for item in items if item not in repeated]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave modules and tests, which stay to the end, out of garbage collections; each took half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # else packages that look for leaks at the exit report some


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip the files that import torch or triton if it is not installed; every second worker begins with the last file.

    On a fresh machine each worker then compiles one half of the files, and finds the other half compiled.
    """
    report = yield
    if isinstance(collector, pytest.Directory) and worker_number(collector.config) % 2:
        report.result.reverse()
    for name in MISSING:
        if report.outcome == "failed" and f"No module named '{name}" in str(report.longrepr):
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: needs {name}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Skip the tests that import torch or triton while they run if it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        if name not in MISSING:
            raise
        pytest.skip(f"needs {name}")


def worker_number(config: pytest.Config) -> int:
    """Return 1 in the worker gw1, and 0 without workers."""
    return int(getattr(config, "workerinput", {}).get("workerid", "gw0").removeprefix("gw"))


@pytest.fixture
def lone_group() -> Iterator[None]:
    """A process group of this process alone."""
    from torch import distributed  # the data half is tested without torch

    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def treepack(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process, through its installed entry point."""
    (entry,) = entry_points(group="console_scripts", name="treepack")
    main = entry.load()

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["treepack", *map(str, arguments)])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            main()
            status = 0
        except SystemExit as stop:
            status = int(stop.code or 0)
        finally:
            for number, handler in handlers.items():
                if signal.getsignal(number) is not handler:
                    signal.signal(number, handler)  # training that fails or stops keeps its own until the end
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return run


@pytest.fixture
def s3(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Start an S3 server with an empty bucket, and a cache of its own; for tests marked s3."""
    with running_store(monkeypatch, tmp_path_factory.mktemp("cache")) as store:
        yield store


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Start an S3 server for all tests marked ray."""
    with pytest.MonkeyPatch.context() as environment:
        # Ray reads these when it is imported; the token keeps other clusters of this machine and their users out.
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        with running_store(environment, tmp_path_factory.mktemp("cache")) as store:
            yield store


@pytest.fixture(scope="session")
def addresses(shared_store: Store) -> Iterator[tuple[str, str]]:
    """Two addresses of a Ray cluster of two workers, which inherit the environment that leads to the S3 server."""
    with running_cluster(workers=2) as addresses:
        yield addresses


@pytest.fixture(scope="session")
def cluster(addresses: tuple[str, str]) -> str:
    """The HOST:PORT of the Ray cluster."""
    return addresses[0]


@pytest.fixture(scope="session")
def client_server(addresses: tuple[str, str]) -> str:
    """The ray://HOST:PORT of the Ray cluster."""
    return addresses[1]


@pytest.fixture
def any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep bitsandbytes from its layout for CPUs with AVX512-BF16, which needs widths that are multiples of 32."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False, raising=False)

"""Settings of all tests.

One thread per process: the models are tiny and the tests run side by side, so more threads only wait for each other.
Without a GPU, Triton runs kernels in its interpreter; it reads the variable once, when it is first imported.
Hypothesis is derandomised, so that a run is repeatable, and has no deadlines, as machines differ. `make test` tries 60
examples of each property, `make test-slow` 150.
"""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import sys
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest
from hypothesis import settings

from support.command_line import Result, Run
from support.s3 import Store, running_store

settings.register_profile("treepack", deadline=None, derandomize=True, max_examples=32)
settings.register_profile("thorough", settings.get_profile("treepack"), max_examples=150)
settings.load_profile("treepack")


@pytest.fixture
def treepack(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process, through its installed entry point."""
    (entry,) = entry_points(group="console_scripts", name="treepack")
    main = entry.load()

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["treepack", *map(str, arguments)])
        try:
            main()
            status = 0
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return run


@pytest.fixture
def s3(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Start an S3 server with an empty bucket, and a cache of its own; for tests marked s3."""
    with running_store(monkeypatch, tmp_path_factory.mktemp("cache")) as store:
        yield store

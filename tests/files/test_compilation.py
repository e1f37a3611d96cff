"""Compiled functions work where no folder can be written, and are cached in a folder that only the user can write."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from support.paths import ROOT
from treepack.files.compilation import compilation_reported, private_folder

# The rows through each node of a root with two leaves, which are in rows 0 and 1.
PROGRAM = """
import treepack, numpy as np
from treepack.files.compilation import compilation_reported
started = []
with compilation_reported(lambda: started.append(1)):
    from treepack.pack.plan.bounds.counting import passes
    print(passes(np.array([-1, 0, 0]), np.array([1, 2]), np.array([0, 1])))
print(treepack.__file__)
print("compiled" if started else "loaded")
"""


def run_program(folder: Path, temporary: Path) -> list[str]:
    """Run it with the package in `folder`, without a home directory and without the rights of root."""
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.getuid() == 0 else []
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/proc/none",
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(folder),
    }
    done = subprocess.run(
        [*drop, sys.executable, "-c", PROGRAM],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(os.getuid() == 0 and shutil.which("setpriv") is None, reason="root can write everywhere")
def test_a_read_only_package_without_a_home_compiles_once_into_the_temporary_directory(tmp_path: Path) -> None:
    package, temporary = tmp_path / "copy" / "treepack", tmp_path / "temporary"
    shutil.copytree(ROOT / "treepack", package, ignore=shutil.ignore_patterns("__pycache__"))
    temporary.mkdir()
    folders = [path for path in (package, *package.rglob("*")) if path.is_dir()]
    for path in folders:
        path.chmod(0o555)
    try:
        for state in ("compiled", "loaded"):
            assert run_program(package.parent, temporary) == ["[2 1 1]", str(package / "__init__.py"), state]
        assert list(temporary.rglob("*.nbi"))
        assert not list(package.rglob("*.nbi"))
    finally:
        for path in folders:
            path.chmod(0o755)


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    folder = private_folder(lambda: str(tmp_path))
    assert folder is not None
    assert folder == private_folder(lambda: str(tmp_path))
    folder.chmod(0o777)  # cached code is executed, so nobody else may write it
    assert private_folder(lambda: str(tmp_path)) is None
    folder.rmdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "theirs")
    assert private_folder(lambda: str(tmp_path)) is None


def test_without_any_temporary_directory_there_is_no_folder(tmp_path: Path) -> None:
    def fail() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    assert private_folder(fail) is None
    assert private_folder(lambda: str(tmp_path / "none")) is None


def test_only_the_compilation_of_a_function_is_reported() -> None:
    @numba.njit  # type: ignore[untyped-decorator]
    def double(value: int) -> int:
        return 2 * value

    started: list[int] = []
    with compilation_reported(lambda: started.append(1)):
        assert (double(2), double(3)) == (4, 6)
    double(1.5)  # a new type, outside the block
    assert started == [1]

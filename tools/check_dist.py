"""Build the sdist and the wheel, and use both as their user does: in fresh environments, without a compiler.

    python tools/check_dist.py [--torch 'torch==X --index-url URL'] [--dist DIR]

    sdist    has everything that its demo and its wheel need; it installs without a compiler too, with slow loops
    wheel    cp311-abi3: one for every Python from 3.11 on; its loops in C load without a compiler
    demo     the commands of the README, from the wheel, on sample_data of the sdist, in a folder of its own
    3.12     the commands without torch, if the machine has a Python 3.12

`make dist` runs this. Fresh environments are in a temporary folder. Packages come from uv, and from pip if uv finds no
index; versions are those of constraints.txt. A step that fails prints its output and ends the check with status 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
# A compiler that is called would fail the installation of a package that has no wheel.
WITHOUT_COMPILER = {"CC": "false", "CXX": "false"}
IS_COMPILED = "from treepack.native.library import is_compiled; print(is_compiled())"


class StepError(Exception):
    """A step failed; the message has its output."""


def call(*command: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output.

    Raises:
        StepError: it ended with another status than 0.
    """
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd, env=variables | dict(environment or {}), text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise StepError(f"{shlex.join(map(str, command))}\n{done.stdout}")
    return done.stdout


class Environment:
    """A fresh virtual environment, and the ways to install into it and to run in it."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        call(python, "-m", "venv", folder)
        self.python = folder / "bin" / "python"

    def install(self, *packages: object, environment: Mapping[str, str] | None = None) -> None:
        """Install packages at the versions of constraints.txt, by uv if it is there and finds them, else by pip."""
        words = ["--quiet", "--constraint", CONSTRAINTS, *packages]
        uv = Path(sys.executable).with_name("uv")
        if uv.exists():
            try:
                call(uv, "pip", "install", "--python", self.python, *words, environment=environment)
                return
            except StepError:
                pass  # pip reads a private index that is not visible here, and reports the error itself
        call(self.python, "-m", "pip", "install", *words, environment=environment)

    def run(self, *words: object, cwd: Path) -> str:
        """Run a program of the environment in `cwd`, without a compiler."""
        first, *others = words
        return call(self.folder / "bin" / str(first), *others, cwd=cwd, environment=WITHOUT_COMPILER)


def build(out: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from the sdist; return the paths of both.

    Raises:
        StepError: a build failed, or the wheel is not for the stable ABI.
    """
    with tempfile.TemporaryDirectory() as folder:
        builder = Environment(Path(folder) / "builder")
        builder.install("build")
        call(builder.python, "-m", "build", "--outdir", out, ROOT)
    (sdist,), (wheel,) = sorted(out.glob("*.tar.gz")), sorted(out.glob("*.whl"))
    if not re.fullmatch(r"treepack-[\d.]+-cp311-abi3-\w+\.whl", wheel.name):
        raise StepError(
            f"{wheel.name}: is no wheel for every Python from 3.11 on; expected treepack-VERSION-cp311-abi3-..."
        )
    return sdist, wheel


def demo_commands() -> list[list[str]]:
    """Return the commands of `make demo`, which are those of the README."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(DEMO)", "demo_out")
    return [shlex.split(line) for line in re.findall(r"^\t\$\(BIN\)/(treepack .+)$", text, re.MULTILINE)]


def check_wheel(wheel: Path, samples: Path, folder: Path, *, python: str, torch: list[str]) -> str:
    """Install the wheel in a fresh environment and run the demo there; without torch, leave out the training.

    Returns:
        the last table of the demo that was printed.
    """
    environment = Environment(folder / "environment", python)
    if torch:
        call(environment.python, "-m", "pip", "install", "--quiet", *torch)
    environment.install(f"{wheel}[{'train,report' if torch else 'report'}]", environment=WITHOUT_COMPILER)
    work = folder / "work"
    shutil.copytree(samples, work / "sample_data")
    if environment.run("python", "-c", IS_COMPILED, cwd=work).strip() != "True":
        raise StepError(f"{wheel.name}: has no loops in C for {environment.python}")
    for command in demo_commands():
        if torch or command[1] != "train":
            printed = environment.run(*command, cwd=work)
            print(f"  $ {shlex.join(command)}")
    return printed


def check_sdist(sdist: Path, samples: Path, folder: Path) -> None:
    """Install the sdist without a compiler and build a trie with the slow loops."""
    environment = Environment(folder / "environment")
    environment.install(sdist, environment=WITHOUT_COMPILER)
    work = folder / "work"
    shutil.copytree(samples, work / "sample_data")
    if environment.run("python", "-c", IS_COMPILED, cwd=work).strip() != "False":
        raise StepError(f"{sdist.name}: its loops in C were built in spite of CC=false")
    build_trie, pack, *_ = demo_commands()
    for command in (build_trie, pack):
        environment.run(*command, cwd=work)
        print(f"  $ {shlex.join(command)}")


def other_python() -> str | None:
    """Return a Python 3.12 of this machine that starts, or None; shims of pyenv may be there and not start."""
    candidates = [shutil.which("python3.12"), *sorted((Path.home() / ".pyenv" / "versions").glob("3.12*/bin/python"))]
    for candidate in filter(None, candidates):
        try:
            if call(candidate, "--version").startswith("Python 3.12"):
                return str(candidate)
        except (StepError, OSError):
            continue
    return None


def main(argv: list[str]) -> int:
    """Build and check everything; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="torch", help="arguments of pip that install torch")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder for the sdist and the wheel")
    options = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            print("build the sdist and the wheel")
            sdist, wheel = build(options.dist)
            with tarfile.open(sdist) as archive:
                archive.extractall(folder, filter="data")
            samples = next(folder.glob("treepack-*")) / "sample_data"
            print(f"{wheel.name}: the demo without a compiler")
            torch = shlex.split(options.torch)
            check_wheel(wheel, samples, folder / "wheel", python=sys.executable, torch=torch)
            print(f"{sdist.name}: without a compiler, by the slow loops")
            check_sdist(sdist, samples, folder / "sdist")
            if (python := other_python()) is None:
                print("no Python 3.12 on this machine; the wheel was not tried with it")
            else:
                print(f"{wheel.name}: {python}, without torch")
                check_wheel(wheel, samples, folder / "other", python=python, torch=[])
    except StepError as failed:
        print(f"failed: {failed}", file=sys.stderr)
        return 1
    print(f"{sdist}\n{wheel}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Compile the kernels of recurrent layers for a GPU that need not exist, and report on them as JSON.

    python tests/support/recurrent_ahead_of_time.py  state_launches  90          bf16/128/128  fp32/64/256
                                                     module          capability  cases: dtype, K, V

prints one line for each case and kernel. `module` is a file of tests/support with a function

    launches(dtype: torch.dtype, keys: int, values: int) -> dict[str, Launch]

which builds the launches of the library from small tensors on the CPU: K is `keys`, V is `values`. Every argument of a
launch that is a tensor counts as aligned to 16 bytes, and every number as any number.

Nothing is compiled under TRITON_INTERPRET. So a test calls `compiled("state_launches", 90, "bf16/128/128")`, which
starts this file as a process of its own, without that variable, and returns the reports. It takes a few seconds per
kernel: mark such tests slow.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from support.ahead_of_time import DTYPES, Report, read, report, signature
from support.paths import ROOT


def compiled(module: str, capability: int, *cases: str) -> list[Report]:
    """Return the reports on all kernels of `module`, case after case; the header explains the arguments."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    command = [sys.executable, "tests/support/recurrent_ahead_of_time.py", module, str(capability), *cases]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reports = read(done.stdout)
    assert reports, "the module has launches"
    return reports


def main(module: str, capability: str, *cases: str) -> None:
    """Print the reports; the header explains the arguments."""
    from triton import knobs
    from triton.compiler import ASTSource

    knobs.compilation.always_compile = True  # a cached kernel has no log
    knobs.nvidia.dump_ptxas_log = True
    launches: Any = importlib.import_module(f"support.{module}").launches
    for case in cases:
        dtype, keys, values = case.split("/")
        for name, launch in launches(DTYPES[dtype], int(keys), int(values)).items():
            source = ASTSource(launch.kernel, *signature(launch))
            print(json.dumps(asdict(report(f"{name} {case}", source, launch.options, int(capability)))))


if __name__ == "__main__":
    assert not os.environ.get("TRITON_INTERPRET"), "nothing is compiled under the interpreter"
    main(*sys.argv[1:])

"""The last net of the command line: an unexpected exception becomes one sentence and a file to report.

    treepack: stopped by a fault of its own (ZeroDivisionError: division by zero, in treepack/pack/row.py:84); please
    report it with /tmp/treepack-fault-k3x9.txt, which has the traceback

If a rank of several loses the connection to another one, the fault is that rank's, and the sentence names no file.

The file has versions, the command and the traceback. Nothing here raises: without room for the file, the sentence
contains the reason. With TREEPACK_TRACEBACK in the environment the traceback is also printed, for machines whose files
do not outlive a job.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

from treepack.errors import described

# How the system, and its loader of shared libraries, say it.
_NO_MEMORY = re.compile("cannot allocate memory|failed to map segment", re.IGNORECASE)
# The place of gloo's code in an error about a connection, and the classes of torch.distributed.
_LOST_RANK = re.compile(r"gloo/transport|^Dist(Backend|Network|Store)Error\b")


def describe_fault(error: BaseException) -> str:
    """Return one sentence about `error`, after its traceback was written to a file of the temporary folder."""
    text = _traceback(error)
    if os.environ.get("TREEPACK_TRACEBACK"):
        with suppress(OSError, ValueError):
            sys.stderr.write(text if text.endswith("\n") else f"{text}\n")
    message = described(error)
    if _LOST_RANK.search(message):
        cause = message.partition(". ")[0]  # gloo adds advice for the developers of gloo
        return f"stopped because another rank of the run ended or does not answer ({cause}); see the error of that rank"
    if isinstance(error, MemoryError) or _NO_MEMORY.search(message):
        return "memory ran out; read fewer inputs at once, use fewer --workers, or raise a limit such as ulimit -v"
    problem = f"stopped by a fault of its own ({message}{_place(error)})"
    try:
        descriptor, name = tempfile.mkstemp(prefix="treepack-fault-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{_versions()}\ncommand: {sys.argv}\n\n{text}")
    except Exception:  # no temporary folder, or a full one
        return f"{problem}; please report it, with the traceback that TREEPACK_TRACEBACK=1 prints"
    return f"{problem}; please report it with {name}, which has the traceback"


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # the exception has a __str__ or a chain that fails itself
        return "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__


def _place(error: BaseException) -> str:
    """Return the last line of treepack in the traceback."""
    root = Path(__file__).resolve().parent.parent
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        with suppress(ValueError, OSError):
            path = Path(frame.filename).resolve().relative_to(root)
            # Every traceback begins in __init__.py of the command line.
            if path.parts[0] in ("treepack", "treepack_cli", "cli") and path.parts[1:] != ("__init__.py",):
                place = f", in {path}:{frame.lineno}"
    return place


def _versions() -> str:
    from treepack import __version__

    return f"treepack {__version__}, Python {platform.python_version()}, {platform.platform()}"

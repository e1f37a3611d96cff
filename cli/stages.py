"""Lines for the parts of a command that take long, such as the import of torch.

[3.1 s] loading the weights of Qwen/Qwen3-0.6B      from the log of the library: `stage_lines`
[0.0 s] importing torch and transformers            `import_torch`
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import click

from .launch import is_first_process
from .progress import is_quiet
from .streams import printable

_START = "treepack.start"  # time of the first line of the command, in its context


class _StageHandler(logging.Handler):
    """Write the log of the library to stderr, with the seconds since the command started; for any thread."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._start = click.get_current_context().meta.setdefault(_START, time.monotonic())

    def emit(self, record: logging.LogRecord) -> None:
        write_line(f"[{time.monotonic() - self._start:.1f} s] {record.getMessage()}")


def write_line(line: str) -> None:
    """Write a line to stderr, above the bar if there is one."""
    if not sys.stderr.isatty():
        click.echo(line, err=True)
        return
    from tqdm import tqdm

    tqdm.write(printable(line), file=sys.stderr)


@contextmanager
def stage_lines(first: str | None = None, *, shown: bool = True) -> Iterator[None]:
    """Write a line to stderr for each part of the block that takes long, unless the command is quiet.

    Args:
        first: a line to begin with.
        shown: False on all ranks except the first.
    """
    logger, handler, level = logging.getLogger("treepack"), _StageHandler(), None
    if shown and not is_quiet():
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    if first:
        logger.info(first)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        if level is not None:
            logger.setLevel(level)


def import_torch() -> None:
    """Import the trainer and transformers, with a line for the seconds that this takes.

    Raises:
        TreepackError: torch is not installed.
    """
    from treepack.train.input_checks import require_torch

    require_torch(click.get_current_context().command_path)
    # Tensors of long rows have a gigabyte each and many sizes; without this, free memory ends up in pieces too small.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    with stage_lines("importing torch and transformers", shown=is_first_process()):
        for name in ("treepack.train.setup.opening", "transformers.modeling_utils", "transformers.masking_utils"):
            import_module(name)

"""The option of `build-trie` and `pack` for a Ray cluster: --ray."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .option_groups import refuse_given

if TYPE_CHECKING:
    from treepack.cluster.ray import RayScheduler

_F = TypeVar("_F", bound=Callable[..., Any])


def ray_option(command: _F) -> _F:
    """Add --ray to a command."""
    return click.option(
        "--ray",
        metavar="ADDRESS",
        help="Run on a Ray cluster: auto for the one that runs here, HOST:PORT or ray://HOST:PORT for another one, or "
        "local to start one here with --workers CPUs. All machines need treepack, and see the same paths or addresses.",
    )(command)


@contextlib.contextmanager
def ray_cluster(address: str, *, workers: int, unsuitable: Sequence[str] = ()) -> Iterator[RayScheduler]:
    """Yield the scheduler of a cluster; `unsuitable` are names of parameters that have no meaning on it.

    Raises:
        UsageError: the user gave one of them, or --workers for a cluster that is not started here.
        TreepackError: see `treepack.cluster.ray.connected_cluster`.
    """
    refuse_given(unsuitable, "{} has no meaning with --ray")
    if address != "local":
        refuse_given(["workers"], f"{{}} has no meaning with --ray {address}")
    from treepack.cluster.ray import connected_cluster

    # Ray prints notes about workers that died to stdout, among the results of a command.
    with contextlib.redirect_stdout(sys.stderr), connected_cluster(address, workers=workers) as scheduler:
        yield scheduler

"""`treepack prepare`: raw rollouts to training rows in one command: build-trie, advantages and pack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from treepack.rl.advantages.advantage_options import ESTIMATORS, FLAT, TREE, AdvantageOptions

from .advantages import show_advantages
from .build_trie import show_build
from .choices import WordChoice
from .config import common_options
from .output import lock_until_end, next_training, show_end
from .pack import show_packing
from .paths import WRITE, refuse_missing
from .planning import pack_options_without_workers
from .progress import progress_bars
from .reading import reading_options
from .sections import SectionedCommand
from .sizes import memory_option

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath
    from treepack.ingest.options import BuildOptions
    from treepack.pack.options import PackOptions


@click.command(cls=SectionedCommand)
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@click.option(
    "--out",
    type=WRITE,
    required=True,
    help="Directory to write the trie and the packed rows into.",
)
@click.option(
    "--advantages",
    "estimator",
    type=WordChoice([name for name in ESTIMATORS if name != "gae"]),  # it needs the values of treepack critic
    help="Also compute advantages from the rewards, with the defaults of treepack advantages, for the RL losses.",
)
@reading_options
@pack_options_without_workers
@memory_option
@click.option("--overwrite", is_flag=True, help="Replace existing outputs.")
@common_options
def prepare(
    inputs: tuple[str, ...],
    out: AnyPath,
    estimator: str | None,
    build: BuildOptions,
    options: PackOptions,
    memory: int | None,
    overwrite: bool,
) -> None:
    """Read rollouts, and write their tries and the packed rows to train on.

    The same as these commands one by one, byte for byte:

    \b
    treepack build-trie INPUT... --out OUT/trie
    treepack advantages OUT/trie --estimator grpo --out OUT/advantages      with --advantages grpo
    treepack pack OUT/trie --out OUT/packed                                 or of OUT/advantages

    --leaf-weights and --fallback-leaves apply to both advantages and pack.
    """
    if estimator in TREE and build.expand == "turns":
        raise click.UsageError(
            f"--advantages {estimator} follows whole rollouts through the tree, and --expand turns makes a trajectory "
            f"of each turn; leave out --expand turns, or take one of {', '.join(FLAT)}"
        )
    refuse_missing(inputs)
    from dataclasses import replace

    from treepack.errors import TreepackError
    from treepack.files.directory import refuse_existing
    from treepack.pack.directory import pack_trie
    from treepack.rl.advantages.directory import write_advantages
    from treepack.trie.directory import build_trie_directory

    trie, packed = out / "trie", out / "packed"
    source = out / "advantages" if estimator else trie
    lock_until_end(out)
    for each in (trie, source, packed):  # before any work; a step that runs checks its output again
        refuse_existing(each, overwrite=overwrite, inputs=list(inputs))
    with progress_bars() as progress:
        built = build_trie_directory(inputs, trie, build, overwrite=overwrite, memory=memory, progress=progress)
    # Everything is written before anything is printed: a reader such as `head` that closes stdout ends the command.
    summary, complete, step = None, trie, "advantages" if estimator else "pack"
    try:
        if estimator:
            advantage_options = AdvantageOptions(
                estimator, leaf_weights=options.leaf_weights, fallback_leaves=options.fallback_leaves
            )
            summary = write_advantages(trie, source, advantage_options, overwrite=overwrite)
            complete, step = source, "pack"
        with progress_bars() as progress:
            options = replace(options, workers=build.workers)
            rows = pack_trie(source, packed, options, overwrite=overwrite, memory=memory, progress=progress)
    except TreepackError as error:
        show_build(built)
        raise TreepackError(f"{error}; {complete} is complete, so treepack {step} can continue from it") from error
    show_build(built)
    if summary is not None:
        click.echo()
        show_advantages(trie, summary, advantage_options)
    click.echo()
    show_packing(rows, is_usual=options.capacity is None, built=built.manifest)
    show_end(trie, summary and source, packed, then=next_training(packed, source))

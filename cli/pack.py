"""`treepack pack`: a trie directory to training rows."""

from __future__ import annotations

from pathlib import Path

import click

from .output import percent, progress, show


@click.command()
@click.argument("trie", type=click.Path(path_type=Path))
@click.option("--capacity", type=click.IntRange(min=1), required=True, help="Most tokens a row may hold.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write.")
@click.option(
    "--method",
    type=click.Choice(["auto", "contiguous", "heuristic", "single-path", "exact", "greedy-online", "sequence"]),
    default="contiguous",
    show_default=True,
    help="How trajectories are put into rows.",
)
@click.option(
    "--too-long",
    type=click.Choice(["error", "drop", "truncate"]),
    default="error",
    show_default=True,
    help="What to do with a trajectory longer than the capacity.",
)
@click.option(
    "--semantics",
    type=click.Choice(["branch", "once"]),
    default="branch",
    show_default=True,
    help="A shared trained token counts for every trajectory, or once.",
)
@click.option(
    "--normalize",
    type=click.Choice(["token", "trajectory", "group"]),
    default="token",
    show_default=True,
    help="What counts alike in the mean loss.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
def pack(
    trie: Path, capacity: int, out: Path, method: str, too_long: str, semantics: str, normalize: str, overwrite: bool
) -> None:
    """Pack a trie directory into rows of at most CAPACITY tokens.

    A row holds one or more subtrees, and each trajectory lies in exactly one row. Prints N_pack (tokens of the rows),
    ERR, the effective reuse ratio 1 - N_pack / N_flat, and the gap to a lower bound that holds for every packing.
    """
    from treepack import schema, shards
    from treepack.directory import MANIFEST, finished_directory, refuse_existing
    from treepack.manifest import file_sha256, read_manifest
    from treepack.pack import fit_capacity, pack_rows
    from treepack.plan import check_plan, packed_trie, plan_rows
    from treepack.readers.records import displayed
    from treepack.stats import packed_totals, trie_totals

    if method == "sequence" and semantics == "once":
        raise click.UsageError("--method sequence shares no token, so --semantics once says nothing there; use branch")
    refuse_existing(out, overwrite=overwrite, inputs=[trie])
    source = read_manifest(trie, schema.TRIE_FORMAT)
    fitted, counts = fit_capacity(shards.read_trie(trie), capacity, too_long=too_long)
    plan = plan_rows(fitted, capacity=capacity, method=method)
    laid_out = packed_trie(fitted, method)
    totals = packed_totals(fitted, plan, check_plan(laid_out, plan))
    manifest = {
        "options": {"method": method, "too_long": too_long, "semantics": semantics, "normalize": normalize},
        "capacity": capacity,
        "trie": {"path": displayed(str(trie)), "sha256": file_sha256(trie / MANIFEST)},
        "tokenizer": source["tokenizer"],
        "totals": trie_totals(fitted) | totals,
        "counts": dict(sorted(counts.items())),
    }
    rows = progress(
        pack_rows(laid_out, plan, semantics=semantics, normalize=normalize), description="packing", total=plan.num_rows
    )
    with finished_directory(out, overwrite=overwrite) as temporary:
        written = shards.write_packed(rows, temporary, manifest)
    show(
        {
            "trajectories": fitted.num_trajectories,
            **counts,
            "rows": totals["num_rows"],
            "N_flat": fitted.tokens_flat,
            "N_tree": fitted.tokens_tree,
            "N_pack": totals["tokens_packed"],
            "POR": percent(1 - fitted.tokens_tree / fitted.tokens_flat),
            "ERR": percent(totals["err"]),
            "fill": percent(totals["fill"]),
            "gap to lower bound": f"at most {percent(totals['gap'])}",
            "bytes per token": sum(entry["bytes"] for entry in written["files"]) / totals["tokens_packed"],
        }
    )

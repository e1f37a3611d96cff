"""`treepack pack`: a trie directory to training rows."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from .output import percent, progress, show, text
from .planning import given_file, limit_options, limits_of, planned, refuse_file, search_options

WAITING = "group_pairs_max_over_mean"


@click.command()
@click.argument("trie", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write.")
@limit_options
@search_options("normal")
@click.option(
    "--plan",
    "plan_path",
    type=click.Path(path_type=Path),
    help="Take the rows from this file instead of planning; docs/format.md describes it.",
)
@click.option("--save-plan", type=click.Path(path_type=Path), help="Also write the plan, as --plan reads it.")
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
def pack(trie: Path, out: Path, plan_path: Path | None, save_plan: Path | None, overwrite: bool, **values: Any) -> None:
    """Pack a trie directory into rows of at most CAPACITY tokens.

    A row holds one or more subtrees, and each trajectory lies in exactly one row. Prints N_pack (tokens of the rows),
    ERR, the effective reuse ratio 1 - N_pack / N_flat, the gap to a lower bound that holds for every packing, the
    greatest number of score pairs of a row over the mean, and the partial tiles of 128 x 128 pairs that attention
    meets.
    """
    from treepack.analysis.stats import packed_totals, trie_totals
    from treepack.errors import TreepackError
    from treepack.files import schema
    from treepack.files.directory import MANIFEST, finished_directory, finished_file, refuse_existing
    from treepack.files.manifest import file_sha256, read_manifest
    from treepack.ingest.readers.inputs import displayed
    from treepack.pack.capacity import fit_capacity
    from treepack.pack.files import write_packed
    from treepack.pack.placement import unordered_tiles
    from treepack.pack.plan.check import check_plan
    from treepack.pack.plan.planning import packed_trie, plan_lines
    from treepack.pack.rows import pack_rows
    from treepack.trie.files import read_trie

    loss = {name: values.pop(name) for name in ("semantics", "normalize")}
    too_long = values.pop("too_long")
    given = given_file(plan_path, values)
    method = given.method if given else values["method"]
    if method == "sequence" and loss["semantics"] == "once":
        raise click.UsageError("--method sequence shares no token, so --semantics once says nothing there; use branch")
    inputs = [trie] if plan_path is None else [trie, plan_path]
    refuse_existing(out, overwrite=overwrite, inputs=inputs)
    refuse_file(save_plan, out, inputs, overwrite=overwrite)
    source, sha256 = read_manifest(trie, schema.TRIE_FORMAT), file_sha256(trie / MANIFEST)
    if given and given.trie not in (None, sha256):
        raise TreepackError(f"{plan_path}: was made for another trie than {trie}; give that one, or plan anew")
    limits = limits_of(given, values)
    fitted, counts = fit_capacity(read_trie(trie), limits.longest, too_long=too_long)
    plan = planned(fitted, given, limits, values)
    laid_out = packed_trie(fitted, method)
    totals = packed_totals(fitted, plan, check_plan(laid_out, plan))
    totals["tiles_partial_unordered"] = unordered_tiles(laid_out, plan)
    asked = {} if given else {name: values[name] for name in ("effort", "time_limit")}
    manifest = {
        "options": {
            **{"method": method, **asked, "pairs_budget": limits.pairs, "terms_budget": limits.terms},
            **{"balance": plan.multiple_of, "too_long": too_long, **loss},
        },
        "capacity": limits.capacity,
        "trie": {"path": displayed(str(trie)), "sha256": sha256},
        "tokenizer": source["tokenizer"],
        "totals": trie_totals(fitted) | totals,
        "counts": dict(sorted(counts.items())),
    }
    rows = progress(pack_rows(laid_out, plan, **loss), description="packing", total=plan.num_rows)
    with ExitStack() as stack:
        if save_plan is not None:
            saved = stack.enter_context(finished_file(save_plan))
            lines = plan_lines(fitted, plan, trie_sha256=sha256)
            saved.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        temporary = stack.enter_context(finished_directory(out, overwrite=overwrite))
        written = write_packed(rows, temporary, manifest)
    _show(fitted.num_trajectories, counts, written)


def _show(num_trajectories: int, counts: dict[str, int], written: dict[str, Any]) -> None:
    totals = written["totals"]
    ranks = {"longest of each group": f"{text(totals[WAITING])} times the mean"} if WAITING in totals else {}
    show(
        {
            "trajectories": num_trajectories,
            **counts,
            "rows": totals["num_rows"],
            "N_flat": totals["tokens_flat"],
            "N_tree": totals["tokens_tree"],
            "N_pack": totals["tokens_packed"],
            "POR": percent(totals["por"]),
            "ERR": percent(totals["err"]),
            "fill": percent(totals["fill"]),
            "gap to lower bound": f"at most {percent(totals['gap'])}",
            "pairs of a row": f"at most {text(totals['pairs_max_over_mean'])} times the mean",
            **ranks,
            "partial tiles": f"{text(totals['tiles_partial'])}, unordered {text(totals['tiles_partial_unordered'])}",
            "bytes per token": sum(entry["bytes"] for entry in written["files"]) / totals["tokens_packed"],
        }
    )

"""The columns that a loss needs, compared with those of packed directories; needs no torch and reads no row.

    packed directories, objective --check_needed_columns--> a refusal by the names of columns and the options of pack

`denominators.check_columns` also refuses columns that lack values in some rows, which takes a look at all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from treepack.columns import remedy
from treepack.data.packed_header import PackedSource
from treepack.errors import TreepackError
from treepack.objectives.objective import Objective


def check_needed_columns(sources: Sequence[PackedSource], objective: Objective) -> None:
    """Refuse directories that lack a column of the objective, or whose weights the loss cannot use.

    Raises:
        TreepackError: a column is missing, one directory of several lacks it, or the weights are normalised already.
    """
    if not objective.has_terms:
        return
    for source in sources:
        _check_source(source, objective)
    for column in optional_columns(objective):
        old = [column in source.term_columns for source in sources]
        if any(old) and not all(old):
            raise TreepackError(
                f"{sources[old.index(False)].path}: has no {column} and {sources[old.index(True)].path} has it; "
                f"{remedy(column)}"
            )


def _check_source(source: PackedSource, objective: Objective) -> None:
    """Refuse one directory, see `check_needed_columns`."""
    name = objective.name
    for column in ("term_token", *objective.columns):
        if column not in source.term_columns:
            raise TreepackError(f"{source.path}: has no {column}, which the loss {name} needs; {remedy(column)}")
    options = source.manifest["options"]
    normalize = options["normalize"]
    if not objective.weighing.is_plain and normalize != "token" and not objective.has_pairs:
        raise TreepackError(
            f"{source.path}: was packed with --normalize {normalize}, and the denominator {objective.denominator} "
            "would normalise its weights again; pack with --normalize token"
        )
    if objective.weighing.column is not None and options["semantics"] == "once":
        raise TreepackError(
            f"{source.path}: was packed with --semantics once, which divides the weights of shared tokens already, as "
            f"the denominator {objective.denominator} does; pack with --semantics branch"
        )


def optional_columns(objective: Objective) -> tuple[str, ...]:
    """Return the columns that the loss reads if a directory has them; then all terms of all directories need them."""
    read = {
        "term_old_logprob": objective.is_policy and objective.old_logprobs != "sampler",
        "term_old_value": objective.has_values and objective.value_clip > 0,
    }
    return tuple(name for name, is_read in read.items() if is_read)

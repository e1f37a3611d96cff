"""Cut the terms of a row into slices, so that only the values of one slice are in memory in forward and backward."""

from __future__ import annotations

from treepack.data.batch import TermTensors, select_terms

# Terms whose values are in memory at a time in forward and backward: about 10 columns of float64, 10 MB.
TERM_CHUNK = 1 << 17


def term_slices(terms: TermTensors, chunk: int, *, begin: int = 0, end: int | None = None) -> list[TermTensors]:
    """Cut `terms`, or the terms from `begin` to `end`, into views of at most `chunk` terms each.

    Tokens, groups and rewards stay whole, because terms refer to them.
    """
    end = len(terms.index) if end is None else end
    return [select_terms(terms, slice(start, min(start + chunk, end))) for start in range(begin, end, chunk)]

"""Cut the terms of a row into slices, so that only the values of one slice are in memory in forward and backward."""

from __future__ import annotations

from dataclasses import fields

from treepack.data.batch import PER_TERM, TermTensors

# Terms whose values are in memory at a time in forward and backward: about 10 columns of float64, 10 MB.
TERM_CHUNK = 1 << 17


def term_slices(terms: TermTensors, chunk: int, *, begin: int = 0, end: int | None = None) -> list[TermTensors]:
    """Cut `terms`, or the terms from `begin` to `end`, into views of at most `chunk` terms each."""
    end = len(terms.index) if end is None else end
    # Columns with one value per term are cut; tokens, group and reward stay whole, because terms refer to them.
    values = {field.name: getattr(terms, field.name) for field in fields(terms)}
    slices = []
    for start in range(begin, end, chunk):
        cut = {name: values[name][start : min(start + chunk, end)] for name in PER_TERM if values[name] is not None}
        slices.append(TermTensors(**{**values, **cut}))
    return slices

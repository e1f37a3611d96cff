"""Tiny models with recurrent layers, and a row with everything that is hard for them.

"qwen3_5_text" --load_hybrid--> LoadedModel in float64, with weights of order one
HARD                            trees, branches of one token, ends inside nodes, trees of one token, padding
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from support.model_table import ACCEPTED
from support.oracle_model import Sample, make_row
from support.tiny_families import family_config, spread_weights
from treepack.data.batch import Batch, make_batch
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel

TRUNK = (1, 2, 3, 4, 5, 6, 7, 8, 9)
_PATHS = (
    (*TRUNK, 10, 12, 13),
    (*TRUNK, 10),  # ends inside another trajectory
    (*TRUNK, 11),  # a node of one token
    (*TRUNK, 14, 15, 16, 17, 18, 19, 20, 21, 22),
    (*TRUNK, 14, 15, 23),
    TRUNK[:4],  # ends inside a node
    (30,),
    (31, 32, 33),
    (31, 34),
)
# float64 needs all of it: a state that is wrong by 1e-9 shows.
SAMPLES = [Sample(tokens, (0.0, *[1.0 + i % 3] * (len(tokens) - 1))) for i, tokens in enumerate(_PATHS)]
HARD: Batch = make_batch(make_row(SAMPLES), multiple=16)


def options_of(kind: str) -> dict[str, Any]:
    """Return the options of the tiny configuration in the table of families."""
    return next(family.options for family in ACCEPTED if family.kind == kind)


def write_config(folder: Path, kind: str, **fields: Any) -> Path:
    """Write the tiny configuration of the table into `folder`; return its path."""
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(family_config(kind, **{**options_of(kind), **fields}).to_dict(), default=str))
    return path


def load_hybrid(folder: Path, kind: str, *, dtype: torch.dtype = torch.float64, **options: Any) -> LoadedModel:
    """Return a tiny model of the table with weights of order one; `options` are those of `load_model`."""
    loaded = load_model(write_config(folder, kind), dtype=dtype, **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        spread_weights(loaded.causal)
    return loaded

"""Model inputs of Tinker: token ids in chunks."""

from __future__ import annotations

from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.ingest.readers.fields.values import objects_at, shown
from treepack.trajectory import Int32, as_token_ids


def model_input_ids(model_input: Any, source: str) -> Int32 | None:
    """Return the token ids of a model input, or of a plain list; None if a chunk is not text."""
    if isinstance(model_input, list):
        return as_token_ids(model_input, source=source, name="ob")
    if not isinstance(model_input, dict):
        raise TreepackError(f"{source}: the model input is {shown(model_input)}; expected chunks of token ids")
    # chunks [{"tokens": [1, 2]}, {"tokens": [3]}] -> [1, 2, 3]
    chunks = objects_at(model_input, "chunks", source)
    if any(not isinstance(chunk.get("tokens"), list) for chunk in chunks):
        return None
    parts = [as_token_ids(chunk["tokens"], source=source, name="tokens") for chunk in chunks]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)

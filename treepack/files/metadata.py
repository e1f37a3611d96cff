"""The metadata of a trajectory, as the column `metadata` of a trie stores it."""

from __future__ import annotations

import json
from typing import Any

import orjson

from treepack.errors import TreepackError


def parse_metadata(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object `text`; `where` names the trajectory.

    Raises:
        TreepackError: it is not a JSON object.
    """
    try:
        try:
            fields = orjson.loads(text)
        except orjson.JSONDecodeError:
            fields = json.loads(text)  # NaN and numbers beyond 64 bits, which a rollout may have
    except (ValueError, RecursionError) as error:
        raise TreepackError(f"{where}: its metadata is no JSON ({error}); build the trie again") from error
    if not isinstance(fields, dict):
        raise TreepackError(f"{where}: its metadata is no JSON object; build the trie again")
    return fields

"""YAML documents as plain values: logs of older versions of ART, which later changed to JSON."""

from __future__ import annotations

from typing import Any

from treepack.errors import TreepackError

SUFFIXES = frozenset({".yaml", ".yml"})


def read_yaml(data: bytes, path: str) -> Any:
    """Return the one document of the file `path` with the bytes `data`.

    Raises:
        TreepackError: pyyaml is not installed, or the file is damaged or has more than plain values.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise TreepackError(f"{path}: is YAML; install pyyaml or write it as JSONL") from None
    try:
        # The safe loader creates no objects of classes; its C version is faster, but not every pyyaml has it.
        return yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise TreepackError(f"{path}: not YAML of plain values ({reason}); fix it or write it as JSONL") from error

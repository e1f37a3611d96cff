"""YAML documents as plain values, for the logs that ART wrote before it wrote JSON."""

from __future__ import annotations

from typing import Any

from treepack.errors import TreepackError

SUFFIXES = frozenset({".yaml", ".yml"})


def read_yaml(data: bytes, path: str) -> Any:
    """The one document of the file `path`, whose bytes are `data`.

    Raises:
        TreepackError: pyyaml is not installed, or the file is damaged or holds more than plain values.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise TreepackError(f"{path}: is YAML; install pyyaml or write it as JSONL") from None
    try:
        return yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise TreepackError(f"{path}: not YAML of plain values ({reason}); mend it or write it as JSONL") from error

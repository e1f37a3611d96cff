"""The safetensors files of a model: which file contains which tensor.

directory | hub name | address --weight_files--> {"model.norm.weight": .../model-00002-of-00002.safetensors, ...}
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from treepack.errors import TreepackError
from treepack.files.model_source import local_source
from treepack.files.remote.hub import is_offline
from treepack.model.foreign_errors import translate_errors

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"

# Names of dtypes in safetensors files. Others, such as types of eight bits, need scales that are stored elsewhere.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def stored_dtypes(source: str | Path, names: Collection[str], default: str | None) -> dict[str, torch.dtype]:
    """Return the dtype in which the weight files of `source` have each of `names`.

    Args:
        source: a model directory or its address, a hub name, or a config file, which has no weights.
        names: names of tensors in a checkpoint.
        default: dtype in config.json ("bfloat16") of tensors that no safetensors file has; None for float32.

    Raises:
        TreepackError: a file cannot be read.
    """
    from safetensors import safe_open

    usual = getattr(torch, default or "", torch.float32)
    found = dict.fromkeys(names, usual if isinstance(usual, torch.dtype) else torch.float32)
    files = (None if str(source).endswith(".json") else weight_files(source)) or {}
    for path in set(files.values()):
        with translate_read_errors(source), safe_open(path, "pt") as file:
            for name in found.keys() & set(file.keys()):
                found[name] = DTYPES.get(file.get_slice(name).get_dtype(), found[name])
    return found


def translate_read_errors(source: str | Path) -> AbstractContextManager[None]:
    """Turn exceptions about the weight files of `source` into one sentence.

    Raises:
        TreepackError: instead of any exception.
    """
    return translate_errors(f"{source}: its weight files cannot be read", "download the whole checkpoint")


def weight_files(source: str | Path) -> dict[str, Path] | None:
    """Return the safetensors file of every tensor by its name, or None if the weights are in another format.

    Raises:
        TreepackError: a file of the checkpoint is missing or cannot be read.
    """
    from safetensors import safe_open
    from transformers.utils import cached_file

    local = local_source(source)
    settings = {
        "local_files_only": is_offline(local),
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_gated_repo": False,
    }

    def find(name: str) -> Path | None:
        with translate_read_errors(source):
            path = cached_file(local, name, **settings)
        return None if path is None else Path(path)

    # The single file first, like transformers: the index may be left over from earlier weights in the same directory.
    single = find(SINGLE_FILE)
    index = find(INDEX_FILE) if single is None else None
    if index is not None:
        # weight_map: {"model.norm.weight": "model-00002-of-00002.safetensors", ...}
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        paths = {name: find(name) for name in sorted(set(names.values()))}
        missing = [name for name, path in paths.items() if path is None]
        if missing:
            raise TreepackError(f"{source}: {missing[0]} is missing; download the whole checkpoint")
        return {name: path for name, file in names.items() if (path := paths[file]) is not None}
    if single is None:
        return None
    with translate_read_errors(source), safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)

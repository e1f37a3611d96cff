"""Reader and planner of DCP that run no code of a checkpoint.

    .metadata               a pickle of DCP's own classes     CheckpointReader.read_metadata
    optimiser, random.RANK  torch.save of plain values        PlainPlanner.load_bytes
    tensors                 torch.save of one tensor          torch.load(weights_only=True), as DCP calls it

A pickle may name any function to call, and DCP loads the first two without a check. Hashes do not help: whoever alters
a checkpoint can write them again. Here each name of a pickle must be in a list; another one is refused.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from treepack.errors import TreepackError

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, f"{name}StorageMetadata") for name in ("Bytes", "Chunk", "Tensor")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks a name up in a dict of layouts
}
_PATHS = {("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath")}

# Names in a pickle of the state of numpy's generator, an array of uint32.
_ARRAYS: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), np.zeros(1).__reduce__()[0]]


class CheckpointReader(FileSystemReader):
    """DCP's reader of the directory `folder`, whose `.metadata` can create DCP's own classes only."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's table of contents.

        Raises:
            TreepackError: the file names another class or function, or does not contain a table of contents.
            OSError: it cannot be read.
        """
        path = self._folder / ".metadata"
        content = path.read_bytes()
        try:
            metadata: Any = _MetadataUnpickler(io.BytesIO(content)).load()
        except _ForeignNameError as error:
            raise _foreign(path, f"names {error}") from None
        except Exception as error:  # other bytes than a pickle may raise anything
            raise _damaged(path) from error
        if not _is_whole(metadata):
            raise _damaged(path)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        whole: Metadata = metadata
        return whole


class PlainPlanner(DefaultLoadPlanner):
    """DCP's planner for the flat state in `folder`; it loads values other than tensors only if they are plain."""

    def __init__(self, folder: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load one value.

        Raises:
            TreepackError: it has more than tensors, arrays, numbers, texts, lists, tuples and dicts.
        """
        name = read_item.dest_index.fqn
        try:
            with torch.serialization.safe_globals(_ARRAYS):
                self.state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise _foreign(self._folder, f"has more than plain values in {name}") from error


class _ForeignNameError(Exception):
    """A pickle names a class or function that is not listed."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PATHS:
            return Path  # the class of a path differs between systems and versions of Python; here it is only a note
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in _NAMES:
            raise _ForeignNameError(f"{module}.{name}")
        return super().find_class(module, name)


def _is_whole(metadata: Any) -> bool:
    """Return True if DCP writes these types, and all data are in files of the checkpoint itself."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_meta, StorageMeta | None):
        return False
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(entries, dict) or not isinstance(places, dict):
        return False
    kinds = (TensorStorageMetadata, BytesStorageMetadata)
    return all(isinstance(name, str) and isinstance(entry, kinds) for name, entry in entries.items()) and all(
        isinstance(index, MetadataIndex)
        and isinstance(info, _StorageInfo)
        and isinstance(info.relative_path, str)
        and Path(info.relative_path).name == info.relative_path
        for index, info in places.items()
    )


def _foreign(path: Path, problem: str) -> TreepackError:
    return TreepackError(
        f"{path}: {problem}, which could run code and which treepack never writes; take a checkpoint that you trust"
    )


def _damaged(path: Path) -> TreepackError:
    return TreepackError(f"{path}: is not a table of contents of a checkpoint; take another checkpoint")

"""Models at addresses: their files are copied to this machine, and loaded from there like a local directory."""

from __future__ import annotations

from pathlib import Path

from treepack.errors import TreepackError
from treepack.files.directory import RUN
from treepack.files.remote import object_store
from treepack.files.remote.address import READ_ONLY, as_path, is_address
from treepack.files.remote.cache import copies_below, local_copy

_FINISHED, VALUE_FILE = "train.json", "value_head.safetensors"
# Files that `train` writes beside the model.
NOT_THE_MODEL = {RUN, _FINISHED, "owner.json", "metrics.jsonl", "tracker.json"}


def local_source(source: str | Path) -> str:
    """Return the path of a copy of the model at an address; a path or a name of the hub is returned as it is.

    The copy stays as long as this process runs, and later processes find it.

    Raises:
        TreepackError: there is no model, or a training run that is not complete, or the store fails.
    """
    path = as_path(source) if is_address(str(source)) else None
    if path is None or isinstance(path, Path) or path.scheme in READ_ONLY:
        return str(source) if path is None else str(path)
    if path.suffix == ".json":
        return str(local_copy(path))
    objects = object_store.list_objects(path)
    if RUN in objects and _FINISHED not in objects:
        raise TreepackError(f"{path}: is a training run that is not complete; finish it with train --resume")
    # Without the contents of folders: checkpoints of a run have many times the size of its model.
    files = {name: info for name, info in objects.items() if "/" not in name and name not in NOT_THE_MODEL}
    if not files:
        raise TreepackError(f"{path}: contains no model; give the address of a folder with config.json and weights")
    return str(next(iter(copies_below(path, files).values())).parent)


def base_beside(folder: Path, name: str) -> str:
    """Return the base model `name` of the adapter in `folder`, whatever folder its relative path was written in.

    A path that leads to nothing from here is tried below the adapter's folder, and below each folder above that.
    """
    # models/base of proj/runs/adapter -> proj/models/base
    places = (each / name for each in (folder.resolve(), *folder.resolve().parents))
    is_found = Path(name).exists() or Path(name).is_absolute()
    return name if is_found else next((str(each) for each in places if (each / "config.json").is_file()), name)

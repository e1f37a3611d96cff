"""Names of models and tokenizers: a folder on this machine, or a model of the Hugging Face hub.

    name --is_offline--> True if only a cached copy can be loaded
    name --snapshot--> the folder with its files: itself, or a folder of the hub's cache
    name, files --download_snapshot--> the folder with these files, from the hub
    name, exception of transformers --load_fault--> one sentence: the fault of the folder, or of the hub

The hub's client tries an unreachable hub six times in half a minute for every file, and then reads its cache. Here one
request decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from textwrap import shorten

from treepack.errors import TreepackError

_TIMEOUT = 10  # seconds
_MAX_REASON = 200  # characters of a message of transformers


def is_offline(name: str) -> bool:
    """Return True if `name` is not on this machine and the hub does not answer, so only a cached copy can be loaded."""
    if Path(name).exists() or _is_path(name):
        return False
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:  # asked first, because importing the library for HTTP takes 0.3 s
        return True
    from huggingface_hub import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except Exception:  # its type depends on the version of the HTTP library, and on offline mode
        return True
    return False


def snapshot(name: str, files: Sequence[str], *, download: bool = True) -> Path | None:
    """Return the folder with the `files` (patterns) of `name` that exist, or None without such a folder or model.

    The files of a model on the hub are brought up to date, unless the hub cannot be reached or `download` is False.

    Raises:
        Exception: of the hub's client; a model of this name does not exist, or needs a login.
    """
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists() or _is_path(name):
        return None
    if not download or is_offline(name):
        return _cached_snapshot(name)
    from huggingface_hub import HfApi, hf_hub_download

    wanted = [path for path in HfApi().list_repo_files(name) if any(fnmatch(path, pattern) for pattern in files)]
    folders = {Path(hf_hub_download(name, path)).parents[path.count("/")] for path in wanted}
    return folders.pop() if len(folders) == 1 else None  # two if the model changed between two files


def download_snapshot(name: str, files: tuple[str, ...]) -> Path:
    """Return the folder of the hub's cache with those `files` of a model that exist.

    Raises:
        TreepackError: the hub cannot be reached, or has none of this name for this user.
    """
    try:
        folder = snapshot(name, files)
    except Exception as error:
        raise load_fault(name, error, kind="model") from error
    if folder is None:
        raise load_fault(name, OSError(f"it has no {' or '.join(files)}"), kind="model")
    return folder


def _cached_snapshot(name: str) -> Path | None:
    """Return the folder of the newest revision of `name` in the hub's cache, or None.

    The client has functions for this too, but importing them takes longer than reading a tokenizer.
    """
    from huggingface_hub import constants

    # models--Qwen--Qwen3-8B/refs/main contains the name of a folder of models--Qwen--Qwen3-8B/snapshots
    folder = Path(constants.HF_HUB_CACHE, "--".join(["models", *name.split("/")]))
    try:
        return folder / "snapshots" / (folder / "refs" / "main").read_text()
    except OSError:
        return None


def refuse_missing(name: str, *, kind: str, files: tuple[str, ...]) -> None:
    """Refuse a name that is a path of this machine without a `kind` ("model", "tokenizer"); asks no hub.

    Raises:
        TreepackError: the path does not exist, or it is a folder without any of `files`.
    """
    path = Path(name)
    if path.is_dir() and not any((path / file).exists() for file in files):
        raise TreepackError(f"{name}: contains no {kind}; give a folder with {' or '.join(files[:2])}, or a hub name")
    if not path.exists() and _is_path(name):
        raise TreepackError(f"{name}: no such file or folder; give the folder of a {kind}, or its name on the hub")


def load_fault(name: str, error: BaseException, *, kind: str) -> TreepackError:
    """Return the error for a `kind` ("model", "tokenizer") that could not be loaded; `refuse_missing` comes first."""
    reason = shorten(str(error), _MAX_REASON, placeholder=" ...") or type(error).__name__
    if Path(name).exists():
        return TreepackError(f"{name}: its {kind} cannot be loaded ({reason}); save it again with transformers")
    if is_offline(name):
        return TreepackError(
            f"{name}: is no folder here, and the Hugging Face hub cannot be reached for a {kind} of this name; check "
            "the path or the network"
        )
    return TreepackError(
        f"{name}: is neither a folder here nor a {kind} that can be read from the Hugging Face hub ({reason}); check "
        "the name, and log in with `hf auth login` if it is private"
    )


def _is_path(name: str) -> bool:
    """Return True if no model of the hub can have this name: names on the hub are NAME or OWNER/NAME."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or name.endswith((".json", "/"))

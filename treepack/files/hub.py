"""Names of models and tokenizers: a folder on this machine, or a model of the Hugging Face hub.

    name --is_offline--> True if only a cached copy can be loaded
    name, exception of transformers --load_fault--> one sentence: the fault of the folder, or of the hub

The hub's client tries an unreachable hub six times in half a minute for every file, and then reads its cache. Here one
request decides.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten

from treepack.errors import TreepackError

_TIMEOUT = 10  # seconds
_MAX_REASON = 200  # characters of a message of transformers


def is_offline(name: str) -> bool:
    """Return True if `name` is not on this machine and the hub does not answer, so only a cached copy can be loaded."""
    if Path(name).exists() or _is_path(name):
        return False
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except Exception:  # its type depends on the version of the HTTP library, and on offline mode
        return True
    return False


def load_fault(name: str, error: Exception, *, kind: str, files: tuple[str, ...]) -> TreepackError:
    """Return the error for a `kind` ("model", "tokenizer") that could not be loaded from `name`.

    A folder of this kind contains at least one of `files`.
    """
    path = Path(name)
    reason = shorten(str(error), _MAX_REASON, placeholder=" ...") or type(error).__name__
    if path.is_dir() and not any((path / file).exists() for file in files):
        return TreepackError(f"{name}: contains no {kind}; give a folder with {' or '.join(files[:2])}, or a hub name")
    if path.exists():
        return TreepackError(f"{name}: its {kind} cannot be loaded ({reason}); save it again with transformers")
    if _is_path(name):
        return TreepackError(f"{name}: no such file or folder; give the folder of a {kind}, or its name on the hub")
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

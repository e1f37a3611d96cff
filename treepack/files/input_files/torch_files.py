"""Files of `torch.save` as plain values: the only reader that imports torch.

    bytes --read_torch--> dicts, lists, text, numbers; tensors become numpy arrays

Only tensors, numpy arrays and plain values are loaded. A file with anything else is refused, because loading it would
run its code.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from treepack.errors import TreepackError, install_hint

# Elements up to which a tensor may repeat stored values, as `expand` makes it: a file of 400 bytes can name 2^40.
_MAX_REPEATED = 1 << 20
MAGIC = b"PK\x03\x04"  # of a zip archive, the format of torch.save since torch 1.6


class NotPlainError(TreepackError):
    """A file of torch is damaged, or has more than tensors and plain values, as a checkpoint may."""


def read_torch(data: bytes, path: str) -> Any:
    """Return the value of the file `path` with the bytes `data`.

    Raises:
        NotPlainError: the file is damaged or has more than tensors and plain values.
        TreepackError: torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise TreepackError(
            f"{path}: is a file of PyTorch, which is not installed; {install_hint('train')}, or write it as JSONL"
        ) from None
    # Names that a pickled numpy array or scalar uses: weights_only=True refuses all names that are not listed.
    arrays: list[Any] = [
        np.ndarray,
        np.dtype,
        *(type(np.dtype(kind)) for kind in "?bBhHiIlLfd"),
        np.zeros(1).__reduce__()[0],
        np.float64(0).__reduce__()[0],
    ]
    try:
        with torch.serialization.safe_globals(arrays):
            return _plain(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True), torch)
    except Exception as error:  # a damaged file may make torch raise anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise NotPlainError(
            f"{path}: not a file of tensors and plain values ({reason}); write its rollouts as JSONL"
        ) from error


def _plain(value: Any, torch: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(part, torch) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, torch) for part in value]
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.numel() > max(_MAX_REPEATED, value.untyped_storage().nbytes() // value.element_size()):
            raise ValueError(f"a tensor of the shape {list(value.shape)} repeats stored values")
        # numpy has no bfloat16. float16 is widened too, so that both give the same type.
        value = (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
        return value.item() if value.ndim == 0 else value
    return value.item() if isinstance(value, np.generic) else value

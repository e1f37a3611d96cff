"""The choice of compilation in a run, from the saving that earlier runs measured on this machine.

    seconds of the run without it, CompilationRecord --pays--> True      then the layers are compiled and measured

The record is a small file in torch's cache of compiled code (`TORCHINDUCTOR_CACHE_DIR`), so it is lost with the code.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from treepack.model.loaded import LoadedModel
from treepack.train.setup.run_plan import ModelProbe

# Seconds that the first steps of a model take longer with compiled layers, without cached code and with it: 27 s less
# from the command to the second step (`benchmarks/first_minute.py`).
COLD, WARM = 45.0, 15.0
# Share of a step that compiled layers save on an H100, at least, from 0.6 to 8 billion weights.
USUAL_SAVING = 0.25


@dataclass(frozen=True)
class CompilationRecord:
    """An earlier compilation of a model on this machine.

    Attributes:
        saved: share of a token's time that it saved.
        plain: measurement of the layers without it.
    """

    saved: float
    plain: ModelProbe


def pays(seconds: float, known: CompilationRecord | None) -> bool:
    """Return True if compilation saves more time than it takes, in a run of `seconds` without it."""
    saved, cost = (USUAL_SAVING, COLD) if known is None else (known.saved, WARM)
    return seconds * saved > cost


def known_compilation(loaded: LoadedModel, dtype: str) -> CompilationRecord | None:
    """Return the record of a model; None if it was not compiled on this machine."""
    path = _path(loaded, dtype)
    with suppress(OSError, ValueError, TypeError, KeyError):
        if path is not None:
            record = json.loads(path.read_text())
            return CompilationRecord(record["saved"], ModelProbe(**record["plain"]))
    return None


def keep_compilation(loaded: LoadedModel, dtype: str, record: CompilationRecord) -> None:
    """Write the record of a model; without a cache of compiled code there is none."""
    path = _path(loaded, dtype)
    with suppress(OSError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(record)))


def _path(loaded: LoadedModel, dtype: str) -> Path | None:
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None:
        return None
    config = loaded.causal.config.get_text_config().to_json_string(use_diff=False)
    device = torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else "cpu"
    # An adapter has gradients of few weights.
    trained = sum(p.numel() for p in loaded.model.parameters() if p.requires_grad)
    name = "\n".join((config, torch.__version__, device, dtype, loaded.attention, str(trained)))
    return Path(folder) / "treepack" / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"

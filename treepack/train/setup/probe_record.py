"""Measurements of a model that are kept for later runs on this machine, and the choice of compilation from them.

    MemoryInput --known_probes--> ModelProbe of layers as they are, and of compiled ones if a run was long enough
    seconds of the run without compilation, both --pays--> True

The record is a small file in torch's cache of compiled code (`TORCHINDUCTOR_CACHE_DIR`), so it is lost with the code.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from treepack import __version__
from treepack.fit.pass_memory import ModelProbe
from treepack.train.setup.memory_input import MemoryInput

# Seconds that the first steps of a model take longer with compiled layers, without cached code and with it.
COLD, WARM = 45.0, 15.0
# Share of a step that compiled layers save on an H100, at least, from 0.6 to 8 billion weights.
USUAL_SAVING = 0.25


def pays(seconds: float, plain: ModelProbe, fused: ModelProbe | None) -> bool:
    """Return True if compilation saves more time than it takes, in a run of `seconds` without it."""
    if fused is None:
        return seconds * USUAL_SAVING > COLD
    return seconds * (1 - fused.seconds_kept / plain.seconds_kept) > WARM


def known_probes(given: MemoryInput, chunk: int) -> tuple[ModelProbe, ModelProbe | None] | None:
    """Return the measurements with logits of `chunk` targets; None if this machine has no record of the model."""
    path = _path(given, chunk)
    with suppress(OSError, ValueError, TypeError, KeyError):
        if path is not None:
            plain, *fused = map(ModelProbe.from_record, json.loads(path.read_text()))
            return plain, fused[0] if fused else None
    return None


def keep_probes(given: MemoryInput, chunk: int, plain: ModelProbe, fused: ModelProbe | None) -> None:
    """Write the record of a model; without a cache of compiled code, it is not written."""
    path = _path(given, chunk)
    with suppress(OSError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps([asdict(each) for each in (plain, fused) if each is not None]))


def _path(given: MemoryInput, chunk: int) -> Path | None:
    loaded, options, ranks = given.loaded, given.options, given.ranks
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None or loaded.device.type != "cuda":  # a CPU measures nothing, except in simulations
        return None
    weights = list(loaded.model.parameters())
    # An adapter has gradients of few weights, and a base of 4 bits fewer bytes.
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    values = (
        loaded.causal.config.get_text_config().to_json_string(use_diff=False),
        (__version__, torch.__version__),
        torch.cuda.get_device_name(loaded.device),
        (given.compute.dtype, loaded.attention, chunk),
        (trained, sum(weight.nbytes for weight in weights)),
        (ranks.size, ranks.sequence, options.ranks_of_experts, options.gather_dtype),
    )
    name = hashlib.sha256("\n".join(map(str, values)).encode()).hexdigest()[:16]
    return Path(folder) / "treepack" / f"{name}.json"

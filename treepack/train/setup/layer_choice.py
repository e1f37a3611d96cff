"""The number of layers that are recomputed in the backward pass, and host memory for tensors that they offload.

longest row or piece, free memory --choose_layers--> number of layers; host memory is reserved
"""

from __future__ import annotations

import logging
import os

import torch

from treepack.errors import TreepackError
from treepack.memory.budget import available_memory
from treepack.memory.device_memory import free_memory, update_bytes
from treepack.memory.host_pages import PAGE
from treepack.memory.shortage import is_memory_error
from treepack.model.layers import AdaptedLayers, adapted_layers, set_recomputed
from treepack.model.loaded import LoadedModel
from treepack.train.options import TrainOptions
from treepack.train.setup.layer_memory import LayerBytes, fewest_recomputed, head_bytes, host_pages, measure_layers
from treepack.train.setup.memory_input import MemoryInput

_log = logging.getLogger("treepack")

# Share of the GPU's memory that `auto` leaves free for fragments and the error of the estimate.
_MARGIN = 0.08
# Share of the available host memory that pages may take; the rest is for rows, checkpoints and other processes.
_HOST_SHARE = 0.9
# Bytes of the optimiser's states for a trained weight.
_STATE_BYTES = {"adamw": 8, "adamw-8bit": 2}


def choose_layers(given: MemoryInput, carry: int | None) -> tuple[int | None, tuple[str, ...]]:
    """Return the number of recomputed layers, None if it is not an option of the run, and notes.

    The host memory of offloaded layers is reserved. `carry` is the number of tokens of a piece.

    Raises:
        TreepackError: the host has too little memory for the longest row, or the layers cannot be measured.
    """
    loaded, chosen = given.loaded, given.options.checkpoint_layers
    adapted = adapted_layers(loaded.causal)
    if adapted is None:
        return _as_number(chosen), ()
    longest = _longest_pass(given, carry)
    notes: tuple[str, ...] = ()
    if chosen == "auto":
        chosen = len(adapted.modules)
        if loaded.device.type == "cuda":
            chosen = _measured_count(given, longest)
            note = f"{chosen} of {len(adapted.modules)} layers are recomputed in the backward pass"
        else:
            note = f"checkpoint_layers auto recomputes all {chosen} layers on a CPU, where torch counts no memory"
        set_recomputed(loaded.causal, chosen)
        notes = (note,)
    if adapted.offload is not None and adapted.recomputed > 0:
        notes = (*notes, _reserve_host(given, adapted, longest))
    return _as_number(chosen), notes


def _as_number(choice: int | str | None) -> int | None:
    assert not isinstance(choice, str), "a model without adapted layers has no auto"
    return choice


def _reserve_host(given: MemoryInput, adapted: AdaptedLayers, longest: int) -> str:
    """Reserve the host memory of offloaded layers for a row of `longest` tokens, and return a note.

    Raises:
        TreepackError: the host has too little memory.
    """
    loaded = given.loaded
    pages = host_pages(loaded, longest, recomputed=adapted.recomputed, lower=given.compute.dtype == "bf16")
    check_host(pages * PAGE, longest)
    kind = "host memory"
    if loaded.device.type == "cuda":
        kind = "pinned host memory"
        _log.info("pinning %s of host memory", _size(pages * PAGE))
        _pin(adapted, pages)
    return f"layers keep at most {_size(pages * PAGE)} of a row in {kind}, for {longest:,} tokens"


def check_host(num_bytes: int, num_tokens: int) -> None:
    """Refuse a row whose checkpoints do not fit into host memory, on all ranks of this machine together.

    Raises:
        TreepackError: naming the bytes, and the tokens that would fit.
    """
    processes, room = _local_processes(), host_room()
    if num_bytes <= room:
        return
    fitting = max(128, int(num_tokens * room / num_bytes) // 128 * 128)
    ranks = f" for each of {processes} ranks" if processes > 1 else ""
    raise TreepackError(
        f"offload_checkpoints needs {_size(num_bytes)} of host memory{ranks} for the longest row of {num_tokens:,} "
        f"tokens, and {_size(room)} may be used; pack with --capacity {fitting}, give a smaller number of "
        "--checkpoint-layers, or train without --offload-checkpoints"
    )


def host_room() -> int:
    """Return the bytes of host memory that each of the ranks of this machine may use."""
    return int(_HOST_SHARE * available_memory()) // _local_processes()


def _local_processes() -> int:
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdecimal() and int(local) > 0 else 1


def state_bytes(options: TrainOptions) -> int:
    """Return the bytes of the optimiser's states on the GPU for each trained weight."""
    return 0 if options.cpu_offload else _STATE_BYTES[options.optimizer]


def _pin(adapted: AdaptedLayers, pages: int) -> None:
    assert adapted.offload is not None
    try:
        adapted.offload.pages.reserve(pages)
    except RuntimeError as error:  # of cudaHostAlloc: a limit that is not part of the estimate
        raise TreepackError(
            f"the GPU driver pinned {_size(adapted.offload.pages.num_bytes)} of {_size(pages * PAGE)} of host memory "
            "(ulimit -l, or a limit of the container); pack with a smaller --capacity, or train without "
            "--offload-checkpoints"
        ) from error


def _longest_pass(given: MemoryInput, carry: int | None) -> int:
    """Return the tokens of the longest row, piece, or pass of known length that has gradients, with padding."""
    longest = given.data.longest_row
    if isinstance(given.options.pass_tokens, int):
        longest = max(longest, min(given.options.pass_tokens, given.largest_step))
    if carry is not None:
        longest = min(longest, carry)
    return -(-longest // 128) * 128


def _measured_count(given: MemoryInput, longest: int) -> int:
    """Return the smallest number of layers to recompute with which the longest pass fits into the GPU's memory.

    Raises:
        TreepackError: the weights are sharded over ranks.
    """
    loaded, options, data = given.loaded, given.options, given.data
    adapted = adapted_layers(loaded.causal)
    assert adapted is not None
    _log.info("measuring the memory of the layers")
    row = max(data.rows.tolist(), key=lambda row: int(data.dataset.num_tokens[row]))
    try:
        layer = measure_layers(loaded, data.dataset[row], lower=given.compute.dtype == "bf16")
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        torch.cuda.empty_cache()
        return len(adapted.modules)
    torch.cuda.empty_cache()
    room = layer_room(loaded, longest, chunk=options.loss_chunk, states=state_bytes(options))
    _log.info("%s", describe_layers(layer, room))
    return fewest_recomputed(layer, len(adapted.modules), longest, room)


def layer_room(loaded: LoadedModel, num_tokens: int, *, chunk: int, states: int) -> float:
    """Return the bytes of the GPU that the layers may use for a row of `num_tokens`.

    `chunk` is the number of targets whose logits are in memory at a time, and `states` the bytes of the optimiser's
    states for each trained weight.
    """
    total = torch.cuda.get_device_properties(loaded.device).total_memory
    update = update_bytes(loaded.model, state_bytes=states)
    return (
        free_memory(loaded.device)
        - _MARGIN * total
        - update
        - head_bytes(loaded.causal, chunk=chunk, num_tokens=num_tokens)
    )


def describe_layers(layer: LayerBytes, room: float) -> str:
    """Return the measured bytes as a line of the log."""
    kept, recomputed, working = (value / 1024 for value in (layer.kept, layer.recomputed, layer.working))
    return (
        f"a layer keeps {kept:.1f} KiB per token, a recomputed one {recomputed:.1f}, and its backward pass needs "
        f"{working:.1f}; {_size(room)} are free for them"
    )


def _size(num_bytes: float) -> str:
    # 48 MiB, 23.4 GiB
    return f"{num_bytes / 2**30:.1f} GiB" if abs(num_bytes) >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"

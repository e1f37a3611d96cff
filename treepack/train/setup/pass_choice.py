"""The tokens of a pass of joined rows, for `pass_tokens` "auto": enough for speed, or less if the GPU is too small."""

from __future__ import annotations

import logging

import torch

from treepack.data.joined import GPU_PASS, usual_pass
from treepack.errors import TreepackError
from treepack.memory.device_memory import free_memory
from treepack.memory.shortage import is_memory_error
from treepack.train.setup.layer_choice import layer_room, state_bytes
from treepack.train.setup.layer_memory import measure_pass
from treepack.train.setup.memory_input import MemoryInput

_log = logging.getLogger("treepack")

_NO_ROOM = (
    "out of memory while the memory of a pass was measured; train with a number for --pass-tokens, "
    "--gradient-checkpointing, --dtype bf16 or on more GPUs"
)


def choose_pass_tokens(given: MemoryInput) -> tuple[int, tuple[str, ...]]:
    """Return the tokens of a pass and notes; all ranks must call this.

    Raises:
        TreepackError: as a pass of the model.
    """
    options, device = given.options, given.loaded.device
    if options.pass_tokens != "auto":
        return int(options.pass_tokens), ()
    limit, longest = usual_pass(device), given.data.longest_row
    if options.offload_checkpoints:
        return min(limit, longest), ()  # the pages of host memory are for the longest row
    # If a row is that long, nothing is measured: every row must fit.
    if device.type != "cuda" or longest >= min(limit, given.largest_step):
        return limit, ()
    _log.info("measuring the memory of a pass")
    limit = given.ranks.smallest(min(limit, fitting_tokens(given)))
    return limit, (f"rows are joined into passes of at most {limit:,} tokens",)


def fitting_tokens(given: MemoryInput) -> int:
    """Return the tokens of a pass that fit into the memory of this rank's GPU, at least 1.

    The ranks of a sharded model meet in every layer, so a rank that runs out of memory inside a pass would leave the
    others waiting. Before each longer pass they agree that it fits into every GPU. A rank that fails all the same
    stops, and the launcher stops the others.

    Raises:
        TreepackError: memory is too small for a pass of a sharded model.
    """
    loaded, options, device = given.loaded, given.options, given.loaded.device

    def all_have(num_bytes: int) -> bool:
        torch.cuda.empty_cache()
        return not given.ranks.any(num_bytes > free_memory(device))

    try:
        fixed, per_token = measure_pass(
            loaded, autocast=given.compute.lower_precision, all_have=None if loaded.root is None else all_have
        )
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        if loaded.root is not None:
            raise TreepackError(_NO_ROOM) from error
        torch.cuda.empty_cache()
        return 1
    torch.cuda.empty_cache()
    room = layer_room(loaded, GPU_PASS, chunk=options.loss_chunk, states=state_bytes(options)) - fixed
    _log.info("a pass needs %.1f KiB per token; %.1f GiB are free for it", per_token / 1024, room / 2**30)
    return max(1, int(room / per_token) // 128 * 128)

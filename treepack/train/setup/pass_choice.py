"""The tokens of a pass of joined rows, for `pass_tokens` "auto".

run --choose_pass_tokens--> the run with a number: what makes a pass fast, or less if the GPU has too little memory
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from treepack.data.joined import GPU_PASS, usual_pass
from treepack.memory.shortage import is_memory_error
from treepack.model.layer_memory import measure_pass
from treepack.train.layer_choice import layer_room, state_bytes
from treepack.train.pieces import lower_precision, smallest

if TYPE_CHECKING:
    from treepack.train.run import TrainingRun

_log = logging.getLogger("treepack")


def choose_pass_tokens(run: TrainingRun) -> TrainingRun:
    """Return the run with a number of tokens of a pass; all ranks must call this.

    Raises:
        TreepackError: as a pass of the model.
    """
    if run.options.pass_tokens != "auto":
        return run
    limit, notes = usual_pass(run.loaded.device), run.notes
    if run.options.offload_checkpoints:
        limit = min(limit, run.longest_row)  # whose pages of host memory are reserved
    elif run.loaded.device.type == "cuda" and run.longest_row < min(limit, run.largest_step):
        # If a row is that long, nothing is measured: every row must fit.
        _log.info("measuring the memory of a pass")
        limit = smallest(run.ranks, min(limit, _fitting_tokens(run)))
        notes = (*notes, f"rows are joined into passes of at most {limit:,} tokens")
    options = replace(run.options, pass_tokens=limit)
    held_out = run.held_out and replace(run.held_out, options=options)
    return replace(run, options=options, notes=notes, held_out=held_out)


def _fitting_tokens(run: TrainingRun) -> int:
    """Return the tokens of a pass that fit into the memory of this rank's GPU, at least 1."""
    loaded, options = run.loaded, run.options
    try:
        fixed, per_token = measure_pass(loaded, autocast=functools.partial(lower_precision, run))
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        torch.cuda.empty_cache()
        return 1
    torch.cuda.empty_cache()
    states = state_bytes(options)
    room = layer_room(loaded, GPU_PASS, chunk=options.loss_chunk, states=states) - fixed
    _log.info("a pass needs %.1f KiB per token; %.1f GiB are free for it", per_token / 1024, room / 2**30)
    return max(1, int(room / per_token) // 128 * 128)

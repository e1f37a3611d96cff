"""Host memory in which inputs and attention outputs of recomputed layers wait (`offload_checkpoints`).

model, longest row --pages_of_row--> pages, which `reserve_host` pins, or refuses
"""

from __future__ import annotations

import logging

from treepack.errors import TreepackError
from treepack.memory.budget import available_memory
from treepack.memory.host_pages import PAGE
from treepack.memory.shortage import gib
from treepack.model.layers import AdaptedLayers, find_layers
from treepack.model.loaded import LoadedModel
from treepack.train.ranks import local_processes

_log = logging.getLogger("treepack")

# Share of the available host memory that pages may take; the rest is for rows, checkpoints and other processes.
_SHARE = 0.9


def host_room() -> int:
    """Return the bytes of host memory that each of the ranks of this machine may use."""
    return int(_SHARE * available_memory()) // (local_processes() or 1)


def moved_tensors(loaded: LoadedModel, *, recomputed: int, lower: bool) -> list[int]:
    """Return the bytes for each token of the tensors that the first `recomputed` layers move to host memory.

    `lower` is True if attention computes in bfloat16.
    """
    config, num_layers = loaded.causal.config.get_text_config(), len(find_layers(loaded.causal))
    weight = loaded.causal.get_input_embeddings().weight
    tensors = [config.hidden_size * weight.element_size()] * recomputed
    if loaded.attention == "triton":  # the only implementation whose outputs are kept
        item = 2 if lower else weight.element_size()
        heads = config.num_attention_heads
        # In a hybrid model, some layers have no attention: their share of the recomputed ones, rounded up.
        count = -(-len(loaded.kinds) * recomputed // max(1, num_layers))
        for kind in loaded.kinds[:count]:
            tensors += [heads * kind.head_dims[1] * item, heads * 4]  # the output and its log-sum-exp
    return tensors


def pages_of_row(loaded: LoadedModel, num_tokens: int, *, recomputed: int, lower: bool) -> int:
    """Return the pages of host memory that the moved tensors of a row of `num_tokens` tokens take."""
    tensors = moved_tensors(loaded, recomputed=recomputed, lower=lower)
    return sum(-(-each * num_tokens // PAGE) for each in tensors)


def reserve_host(loaded: LoadedModel, adapted: AdaptedLayers, longest: int, *, lower: bool) -> str:
    """Reserve the host memory of offloaded layers for a row of `longest` tokens, and return a note.

    Raises:
        TreepackError: the host has too little memory.
    """
    pages = pages_of_row(loaded, longest, recomputed=adapted.recomputed, lower=lower)
    check_host(pages * PAGE, longest)
    kind = "host memory"
    if loaded.device.type == "cuda":
        kind = "pinned host memory"
        _log.info("pinning %s of host memory", gib(pages * PAGE))
        _pin(adapted, pages)
    return f"layers keep at most {gib(pages * PAGE)} of a row in {kind}, for {longest:,} tokens"


def check_host(num_bytes: int, num_tokens: int) -> None:
    """Refuse a row whose checkpoints do not fit into host memory, on all ranks of this machine together.

    Raises:
        TreepackError: naming the bytes, and the tokens that would fit.
    """
    processes, room = local_processes() or 1, host_room()
    if num_bytes <= room:
        return
    fitting = max(128, int(num_tokens * room / num_bytes) // 128 * 128)
    ranks = f" for each of {processes} ranks" if processes > 1 else ""
    raise TreepackError(
        f"offload_checkpoints needs {gib(num_bytes)} of host memory{ranks} for the longest row of {num_tokens:,} "
        f"tokens, and {gib(room)} may be used; pack with --capacity {fitting}, give a smaller number of "
        "--checkpoint-layers, or train without --offload-checkpoints"
    )


def _pin(adapted: AdaptedLayers, pages: int) -> None:
    assert adapted.offload is not None
    try:
        adapted.offload.pages.reserve(pages)
    except RuntimeError as error:  # of cudaHostAlloc: a limit that is not part of the estimate
        raise TreepackError(
            f"the GPU driver pinned {gib(adapted.offload.pages.num_bytes)} of {gib(pages * PAGE)} of host memory "
            "(ulimit -l, or a limit of the container); pack with a smaller --capacity, or train without "
            "--offload-checkpoints"
        ) from error

"""Adapt a model of transformers to the engine in this process, and set up the manager of continuous batching.

model --twin--> the same parameters under transformers' attention
LocalOptions --manager_settings--> settings of the manager, for several versions of transformers
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

import torch
from packaging.version import Version

from treepack.errors import TreepackError
from treepack.model.accept.compatibility import count_recurrent_layers
from treepack.model.layers import head_widths
from treepack.rollout.in_process import local_attention

OLDEST_TRANSFORMERS = "5.17"
_CPU_CACHE_TOKENS = 32768  # a cache of the default size would take nine tenths of the machine's memory
_CPU_BATCH_TOKENS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class LocalOptions:
    """Memory of a local engine.

    Raises:
        TreepackError: a value that makes no sense, by its name.
    """

    page_size: int = 16  # tokens of a page of the cache; prompts share only full pages
    # Tokens whose keys and values fit in the cache, of all requests together. None takes `memory_share` of the GPU, or
    # `_CPU_CACHE_TOKENS`.
    cache_tokens: int | None = None
    memory_share: float = 0.8  # share of the free memory of the GPU for the cache and the other needs of the manager

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        if self.page_size < 4:
            raise TreepackError(f"page_size is {self.page_size}; expected at least 4 tokens")
        if self.cache_tokens is not None and self.cache_tokens < self.page_size:
            raise TreepackError(f"cache_tokens is {self.cache_tokens}; expected at least a page of {self.page_size}")
        if not 0 < self.memory_share <= 1:
            raise TreepackError(f"memory_share is {self.memory_share}; expected a share above 0 and at most 1")


def twin(model: Any) -> Any:
    """Return a model with the parameters and buffers of `model`, not copies, under transformers' attention.

    Raises:
        TreepackError: transformers cannot compute its attention over pages, or its parameters differ from its
            class, as with adapters, or not whole.
    """
    _check_attention(model)
    config = copy.deepcopy(model.config)
    # Models with sinks have no sdpa; the dense code of transformers for pages computes them.
    attention = _attention() if model._supports_sdpa else "paged|eager"
    with torch.device("meta"):
        other = type(model)._from_config(config, attn_implementation=attention, dtype=model.dtype)
    if model._supports_sdpa and local_attention.takes(config.get_text_config(), model.device, model.dtype):
        local_attention.register_local_attention()
        prefix = "paged|" if "paged|" in _attention() else ""
        # Not by the model's own method, which looks for a package of every name with "flash".
        other.config.get_text_config()._attn_implementation = prefix + local_attention.NAME
    for kind in ("parameters", "buffers"):
        theirs = dict(getattr(model, f"named_{kind}")(remove_duplicate=False))
        ours = dict(getattr(other, f"named_{kind}")(remove_duplicate=False))
        if theirs.keys() != ours.keys() or any(theirs[name].shape != ours[name].shape for name in ours):
            raise TreepackError(
                f"{type(model).__name__}: its {kind} differ from its class; sample from a model with whole "
                "weights on one device, with adapters merged into them"
            )
        for name, tensor in theirs.items():
            owner, _, leaf = name.rpartition(".")
            getattr(other.get_submodule(owner), f"_{kind}")[leaf] = tensor
    return other.eval()


def _check_attention(model: Any) -> None:
    """Refuse attention that transformers does not compute over pages, or not as the model's own code does.

    Raises:
        TreepackError: naming it.
    """
    config = model.config.get_text_config()
    reason = None
    if getattr(config, "attn_logit_softcapping", None):
        reason = "caps its scores, which transformers does not do over pages of keys"
    widths = set(head_widths(config))
    if getattr(config, "qk_rope_head_dim", None):  # latent attention: its head_dim is the width of a part
        widths.add(config.qk_nope_head_dim + config.qk_rope_head_dim)
    if getattr(config, "v_head_dim", None):
        widths.add(config.v_head_dim)
    if any(count_recurrent_layers(config)):
        reason = "has layers with a state or a convolution, and the pages of transformers have keys and values only"
    elif len(widths) > 1:
        reason = "has keys and values of several widths, and the pages of transformers have one"
    if reason is not None:
        raise TreepackError(f"{type(model).__name__}: {reason}; sample from a server")


def check_transformers() -> None:
    import transformers

    if Version(transformers.__version__) < Version(OLDEST_TRANSFORMERS):
        raise TreepackError(
            f"the local engine needs transformers {OLDEST_TRANSFORMERS} and this is {transformers.__version__}; "
            "upgrade it, or sample from a server"
        )


def _attention() -> str:
    # Older versions had implementations of their own for pages.
    return "sdpa" if "auto_switch_to_flash" in _known_settings() else "paged|sdpa"


def _known_settings() -> set[str]:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    return {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}


def _is_of_use(record: logging.LogRecord) -> bool:
    # Without psutil the manager does not know the free memory of a CPU; `manager_settings` limits its cache anyway.
    return "psutil" not in record.getMessage()


def manager_settings(options: LocalOptions, device_type: str) -> Any:
    """Return the manager's settings: step by step and without graphs, because `Choice` is Python code in each step."""
    logging.getLogger("ContinuousBatchingLogger").addFilter(_is_of_use)
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    known = _known_settings()
    tokens, batch = options.cache_tokens, None
    if device_type == "cpu":
        tokens, batch = tokens or _CPU_CACHE_TOKENS, _CPU_BATCH_TOKENS
    settings: dict[str, Any] = {
        # The page's tokens have another name in older versions.
        "page_size" if "page_size" in known else "block_size": options.page_size,
        "num_blocks": None if tokens is None else -(-tokens // options.page_size),
        "max_batch_tokens": batch,
        "max_memory_percent": options.memory_share,
        "use_cuda_graph": False,
        "use_async_batching": False,
        "max_blocks_per_request": 0,
        "auto_switch_to_flash": False,
    }
    return ContinuousBatchingConfig(**{name: value for name, value in settings.items() if name in known})


def failure(name: str, error: str) -> Any:
    from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

    return GenerationOutput(request_id=name, error=error, status=RequestStatus.FAILED)

"""A model that is ready to train on packed rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from treepack.attention.interface import AttentionKind
from treepack.model.head.value_head import ValueHead, value_head_of
from treepack.sequence.share import SequenceGroup, sequence_of

_T = TypeVar("_T")


@dataclass(frozen=True)
class LoadedModel:
    """A model that passed every check of its own.

    Attributes:
        model: the model of transformers, in eval mode.
        source: the argument of `load_model`, for messages.
        attention: the implementation in use, never "auto".
        notes: remarks for the user.
        varlen: True if rows without a branch go to varlen FlashAttention.
        kinds: the kind of attention of each layer, in order; layers without attention have none.
        device: the device that computes.
        root: the module that gathers the weights if they are sharded over ranks (`train.sharding`), else None.
    """

    model: Any
    source: str
    attention: str
    notes: tuple[str, ...]
    varlen: bool = False
    kinds: tuple[AttentionKind, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    root: Any = None

    @property
    def causal(self) -> Any:
        """The causal language model of transformers: `model`, or the one inside a PEFT model."""
        from transformers import PreTrainedModel

        if isinstance(self.model, PreTrainedModel):
            return self.model
        return next(module for module in self.model.modules() if isinstance(module, PreTrainedModel))

    @property
    def value_head(self) -> ValueHead | None:
        """The value head of a critic; None for a model without one."""
        return value_head_of(self.causal)

    @property
    def sequence(self) -> SequenceGroup | None:
        """The ranks that compute every row together (`sequence.share.share_rows`), or None if each works alone."""
        return sequence_of(self.causal)

    @property
    def attention_alone(self) -> str:
        """The attention of transformers that computes this model's trajectories alone: sdpa, or eager."""
        # In some versions of transformers, `_supports_sdpa` is True for models whose caps or sinks sdpa ignores.
        ignored = any(kind.has_sinks or kind.softcap is not None for kind in self.kinds)
        return "sdpa" if self.causal._supports_sdpa and not ignored else "eager"

    def compute(self, function: Callable[[], _T]) -> _T:
        """Run `function`, which runs the model, with its weights gathered from all ranks; return the result.

        Gradients flow through the tensors of the result: a tensor, or tensors in tuples, lists and dicts.
        """
        result: _T = function() if self.root is None else self.root(function)
        return result

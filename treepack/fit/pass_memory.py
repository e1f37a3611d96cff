"""Measurements of a model's passes, and the memory and time of passes that did not run.

    bytes of a pass = casts of the kept layers + the larger peak of two:
        forward     until the gradients reach the last layer: what layers keep, and the logits of a chunk
        backward    after that: what layers keep, and the activations of one of them; logits are free again

Short passes have the first peak and long ones the second, so neither follows from the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Time of a pass whose layers all run again, whose attention does not, in passes whose layers keep their activations.
AGAIN = 1.25


@dataclass(frozen=True)
class PeakBytes:
    """A peak of GPU memory in a pass over whole rows, beside logits and casts.

    Attributes:
        fixed: bytes beside the tokens; negative if the logits of the measured passes needed less than assumed.
        kept: bytes of a token if every layer keeps its activations.
        recomputed: bytes of a token if every layer runs again in the backward pass.
    """

    fixed: int
    kept: float
    recomputed: float


@dataclass(frozen=True)
class ModelProbe:
    """Measured bytes on the GPU, and seconds, of forward and backward passes over whole rows.

    Attributes:
        compiled: True if the layers were compiled.
        num_layers: layers that can be recomputed; 0 if the model has none.
        logits: bytes of a target's logits.
        tokens: of the longest pass that ran.
        forward: peak until the gradients reach the last layer.
        backward: peak after that.
        seconds_kept: of a token if every layer keeps its activations.
        casts: bytes of weights that layers cast, and keep for the backward pass unless they run again.
    """

    compiled: bool
    num_layers: int
    logits: int
    tokens: int
    forward: PeakBytes
    backward: PeakBytes
    seconds_kept: float
    casts: int = 0

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> ModelProbe:
        """Return the probe with the values of `dataclasses.asdict`.

        Raises:
            KeyError, TypeError: a different version of treepack wrote the record.
        """
        peaks = {name: PeakBytes(**record[name]) for name in ("forward", "backward")}
        return cls(**{**record, **peaks})

    def token_bytes(self, peak: PeakBytes, recomputed: int) -> float:
        """Return the bytes of a token at a peak if the first `recomputed` layers run again."""
        if recomputed and recomputed == self.num_layers:
            return peak.recomputed
        # Memory that one more recomputed layer saves: at the end of the forward pass there is nothing else.
        spared = (self.forward.kept - self.forward.recomputed) / max(1, self.num_layers)
        # The peak is while kept layers run backward, or in the recomputed layer that runs backward first, when they are
        # free: 4 layers, kept 40, spared 8, recomputed 15 -> 40 32 24 16 15
        return max(peak.recomputed, peak.kept - recomputed * spared)

    def pass_bytes(self, tokens: int, recomputed: int, chunk: int, *, moved: int = 0) -> int:
        """Return the bytes of a pass of `tokens` tokens if the first `recomputed` layers run again.

        `chunk` targets have logits at a time. Each recomputed layer moves `moved` bytes of a token to host memory; the
        tensors of two layers are on the GPU.
        """
        away = max(0, recomputed - 2) * moved
        forward, backward = (
            peak.fixed + tokens * (self.token_bytes(peak, recomputed) - away) for peak in (self.forward, self.backward)
        )
        casts = self.casts * (1 - recomputed / max(1, self.num_layers))
        return int(casts + max(0, forward + min(chunk, tokens) * self.logits, backward))

    def seconds(self, recomputed: int) -> float:
        """Return the seconds of a token in a long pass."""
        return self.seconds_kept * slower(recomputed, self.num_layers)


def slower(recomputed: int, num_layers: int) -> float:
    """Return the time of a pass with recomputed layers, in passes without: 2 of 4 layers -> 1.125."""
    return 1 + (AGAIN - 1) * recomputed / max(1, num_layers)

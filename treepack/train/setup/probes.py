"""Measurements of a model, from which `run_plan` computes the memory and the time of passes that did not run.

    bytes of a pass = casts of the kept layers + the larger peak of two:
        forward     until the gradients reach the last layer: what layers keep, and the logits of a chunk
        backward    after that: what layers keep, and the activations of one of them; logits are free again

Short passes have the first peak and long ones the second, so neither follows from the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treepack.carry.limit import CarryCosts

# Targets whose logits are in memory while pieces are measured: more would hide the memory of layers in short pieces.
PIECE_LOGITS = 128


@dataclass(frozen=True)
class PeakBytes:
    """A peak of GPU memory in a pass over whole rows, beside logits and casts.

    Attributes:
        fixed: bytes beside the tokens.
        kept: bytes of a token if every layer keeps its activations.
        recomputed: bytes of a token if every layer runs again in the backward pass.
        spared: bytes of a token that one more recomputed layer does not keep.
    """

    fixed: int
    kept: float
    recomputed: float
    spared: float = 0.0

    def of_token(self, recomputed: int, num_layers: int) -> float:
        """Return the bytes of a token if the first `recomputed` of the layers run again."""
        if recomputed and recomputed == num_layers:
            return self.recomputed
        # The peak is before the backward pass, with all that layers keep, or in the recomputed layer that runs backward
        # first, when the kept layers after it are free: 4 layers, kept 40, spared 10, recomputed 15 -> 40 30 20 15 15
        return max(self.recomputed, self.kept - recomputed * self.spared)


@dataclass(frozen=True)
class ModelProbe:
    """Measured bytes on the GPU, and seconds, of forward and backward passes over whole rows.

    Attributes:
        compiled: True if the layers were compiled.
        num_layers: layers that can be recomputed; 0 if the model has none.
        logits: bytes of a target's logits.
        forward: peak until the gradients reach the last layer.
        backward: peak after that.
        seconds_kept: of a token if every layer keeps its activations.
        seconds_recomputed: of a token if every layer runs again.
        launch: seconds of a pass of few tokens, in which the processor starts kernels and ranks exchange weights.
        casts: bytes of weights that layers cast, and keep for the backward pass unless they run again.
    """

    compiled: bool
    num_layers: int
    logits: int
    forward: PeakBytes
    backward: PeakBytes
    seconds_kept: float
    seconds_recomputed: float
    launch: float
    casts: int = 0

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> ModelProbe:
        """Return the probe with the values of `dataclasses.asdict`.

        Raises:
            KeyError, TypeError: the record is of a different version.
        """
        peaks = {name: PeakBytes(**record[name]) for name in ("forward", "backward")}
        return cls(**{**record, **peaks})

    def pass_bytes(self, tokens: int, recomputed: int, chunk: int, *, moved: int = 0) -> int:
        """Return the bytes of a pass of `tokens` tokens if the first `recomputed` layers run again.

        `chunk` targets have logits at a time. Each recomputed layer moves `moved` bytes of a token to host memory; the
        tensors of two layers are on the GPU.
        """
        away = max(0, recomputed - 2) * moved
        forward, backward = (
            each.fixed + tokens * (each.of_token(recomputed, self.num_layers) - away)
            for each in (self.forward, self.backward)
        )
        casts = self.casts * (1 - recomputed / max(1, self.num_layers))
        return int(casts + max(forward + min(chunk, tokens) * self.logits, backward))

    def seconds(self, recomputed: int) -> float:
        """Return the seconds of a token in a long pass."""
        share = recomputed / max(1, self.num_layers)
        return self.seconds_kept + share * (self.seconds_recomputed - self.seconds_kept)


@dataclass(frozen=True)
class PieceProbe:
    """Measured bytes of rows in pieces, with all layers recomputed or none."""

    compiled: bool
    recomputed: int
    costs: CarryCosts

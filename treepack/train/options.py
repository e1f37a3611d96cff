"""How to train: every choice of `treepack train` but its paths, checked once.

Options in `ANY_TIME` say how a run is carried out and may differ when it is resumed; all others are part of what is
computed.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from treepack.attention import IMPLEMENTATIONS
from treepack.errors import TreepackError
from treepack.model.loss import CHUNK
from treepack.model.objectives import Objective

ANY_TIME = frozenset(
    {
        *("gradient_checkpointing", "compile", "attention", "loss_chunk", "device", "gather_dtype", "cpu_offload"),
        *("checkpoint_every", "keep", "max_skipped"),
    }
)
_LEAST = {
    **{"steps": 1, "epochs": 1, "rows_per_step": 1, "loss_chunk": 1, "keep": 1},
    **{"warmup_steps": 0, "checkpoint_every": 0, "max_skipped": 0},
}
_KNOWN = {"dtype": ("fp32", "bf16"), "gather_dtype": ("fp32", "bf16"), "attention": tuple(IMPLEMENTATIONS)}


@dataclass(frozen=True)
class TrainOptions:
    """How to train; see the command line for the same names.

    `steps`, where given, overrides `epochs`. `rows_per_step` counts the rows of all ranks together. `clip` is the
    greatest gradient norm, 0 for none. `dtype` "bf16" keeps float32 weights under autocast. `device` "auto" is the GPU
    where there is one. `objective` is what is minimised. `gather_dtype` is what sharded weights travel in, and
    `cpu_offload` keeps them and the optimiser on the CPU; both without meaning in one process. A checkpoint is written
    every `checkpoint_every` steps, 0 for only when told to stop, and the newest `keep` stay. `max_skipped` steps in a
    row may have a loss or gradient that is not finite.
    """

    steps: int | None = None
    epochs: int = 1
    rows_per_step: int = 8
    lr: float = 1e-5
    min_lr_ratio: float = 0.1
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    dtype: str = "fp32"
    gradient_checkpointing: bool = False
    compile: bool = False
    attention: str = "auto"
    loss_chunk: int = CHUNK
    device: str = "auto"
    seed: int = 0
    objective: Objective = field(default_factory=Objective)
    gather_dtype: str = "fp32"
    cpu_offload: bool = False
    checkpoint_every: int = 100
    keep: int = 2
    max_skipped: int = 5

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise TreepackError(f"{name} is {value}; expected at least {least}")
        for name in ("lr", "min_lr_ratio", "weight_decay", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise TreepackError(f"{name} is {value}; expected a finite number of at least 0")
        if not 0 <= self.seed < 2**63:
            raise TreepackError(f"seed is {self.seed}; expected 0 to 2**63 - 1")
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise TreepackError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")

    def as_record(self) -> dict[str, Any]:
        """The options as JSON values."""
        record = asdict(self)
        return {**record, "betas": list(self.betas)}

    @property
    def fixed(self) -> dict[str, Any]:
        """What a resumed run may not change, as JSON values."""
        return {name: value for name, value in self.as_record().items() if name not in ANY_TIME}

"""Options of a training run: all options of `treepack train` except its paths, checked once.

The options in `CHANGEABLE_ON_RESUME` change the speed, memory or safety of a run and may differ when it is resumed.
The options in `LENGTH_OPTIONS` may extend it. All other options change the result and must stay the same.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from treepack.attention import IMPLEMENTATIONS
from treepack.data.joined import check_pass_tokens
from treepack.errors import TreepackError
from treepack.model.adapters.adapter import LoraOptions
from treepack.model.head.token_loss import CHUNK
from treepack.model.objectives.objective import Objective

CHANGEABLE_ON_RESUME = frozenset(
    "gradient_checkpointing checkpoint_layers offload_checkpoints compile attention carry pass_tokens loss_chunk "
    "device gather_dtype cpu_offload checkpoint_every keep max_skipped".split()
)
# Options that define the number of steps. A resumed run may have more steps than before, or fewer, but not fewer than
# are done.
LENGTH_OPTIONS = frozenset({"steps", "epochs", "patience"})
_MINIMUM = {
    "steps": 1,
    "epochs": 1,
    "rows_per_step": 1,
    "blocks": 1,
    "loss_chunk": 1,
    "keep": 1,
    "warmup_steps": 0,
    "checkpoint_every": 0,
    "eval_every": 1,
    "patience": 0,
    "max_skipped": 0,
}
_CHOICES = {
    "optimizer": ("adamw", "adamw-8bit"),
    "dtype": ("auto", "fp32", "bf16"),
    "gather_dtype": ("fp32", "bf16"),
    "routes": ("replay", "ignore"),
    "attention": tuple(IMPLEMENTATIONS),
}


@dataclass(frozen=True)
class TrainOptions:
    """Options of a training run, with the names and defaults of the command line."""

    # Length of the run
    steps: int | None = None  # optimiser steps; overrides `epochs` if it is not None
    epochs: int = 1
    rows_per_step: int = 8  # rows of all ranks together
    # Optimiser
    lr: float = 1e-5
    min_lr_ratio: float = 0.1  # with the cosine and betas below, usual since GPT-3 (arXiv 2005.14165, appendix B)
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0  # maximum gradient norm, 0 for no clipping
    optimizer: str = "adamw"  # "adamw-8bit" is AdamW of bitsandbytes, with states of 8 bits
    # Precision, speed and memory
    dtype: str = "auto"  # "bf16": float32 weights under autocast; "auto": bf16 on a GPU that has it, else fp32
    gradient_checkpointing: bool = False  # computes all layers again in the backward pass
    checkpoint_layers: int | str | None = None  # computes so many again; "auto": the fewest with which the rows fit
    offload_checkpoints: bool = False  # computes layers again and keeps inputs and attention outputs in host memory
    compile: bool = False  # compiles the layers
    # Data
    mix: tuple[float, ...] | None = None  # a share of the rows for each directory; None: each row once per epoch
    # Divides the rows of each training step into blocks of neighbouring rows, so that a machine reads its own; None is
    # the number of machines if the rows are remote, else 1.
    blocks: int | None = None
    init_from: str | None = None  # a run, checkpoint or model whose weights replace those of the model at the start
    attention: str = "auto"  # the implementation of attention
    loss_chunk: int = CHUNK  # targets whose logits are in memory at a time
    device: str = "auto"  # "auto": a GPU if there is one, else the CPU
    seed: int = 0
    objective: Objective = field(default_factory=Objective)  # the loss to minimise
    # Sharded weights; both have no effect in one process
    gather_dtype: str = "fp32"  # dtype in which weights travel between ranks
    cpu_offload: bool = False  # keeps weights and optimiser on the CPU
    # Checkpoints and evaluation
    checkpoint_every: int = 100  # optimiser steps between checkpoints; 0: only when `stop` ends the run
    keep: int = 2  # newest checkpoints to keep; if the newest is damaged, the run continues from the one before
    eval_every: int = 100  # optimiser steps between evaluations of held-out rows, which follow the last step too
    patience: int = 0  # evaluations without a lower loss after which the run ends with its best model; 0: never
    lora: LoraOptions | None = None  # trains an adapter only
    router_aux: float = 0.0  # coefficient of the load-balancing loss of routers, for sft only; `experts.router_balance`
    routes: str = "replay"  # "replay": tokens take the experts that the rows recorded (`experts.replay`); or "ignore"
    carry: int | str | None = None  # longer rows run in pieces of so many tokens; "auto" chooses; None: rows stay whole
    pass_tokens: int | str = "auto"  # rows are joined into passes of at most so many tokens; "auto" chooses; 1: none
    max_skipped: int = 5  # consecutive steps without a finite loss; more mean that the model has diverged for good

    def __post_init__(self) -> None:
        """Refuse invalid values.

        Raises:
            TreepackError: with the name of the option.
        """
        for name, minimum in _MINIMUM.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise TreepackError(f"{name} is {value}; expected at least {minimum}")
        for name in ("lr", "min_lr_ratio", "weight_decay", "clip", "router_aux"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise TreepackError(f"{name} is {value}; expected a finite number of at least 0")
        if self.router_aux and self.objective.loss != "sft":
            raise TreepackError(
                f"router_aux is {self.router_aux} with the loss {self.objective.loss}; reinforcement learning and dpo "
                "leave the auxiliary loss of routers out, so give 0"
            )
        layers = self.checkpoint_layers
        if layers not in (None, "auto") and not (isinstance(layers, int) and layers >= 0):
            raise TreepackError(f"checkpoint_layers is {layers!r}; expected a number of layers, auto or None")
        if layers == 0 and self.offload_checkpoints:
            raise TreepackError("offload_checkpoints offloads recomputed layers and checkpoint_layers is 0; omit one")
        if self.carry not in (None, "auto") and not (isinstance(self.carry, int) and self.carry >= 1):
            raise TreepackError(f"carry is {self.carry!r}; expected a number of tokens of at least 1, auto or None")
        check_pass_tokens(self.pass_tokens)
        if self.checkpoint_layers == "auto" and self.carry is not None:
            raise TreepackError(
                f"checkpoint_layers is auto and carry is {self.carry}; memory for pieces is planned for a known number "
                "of layers, so give checkpoint_layers a number or omit it"
            )
        if self.router_aux and self.carry is not None:
            raise TreepackError(
                f"router_aux is {self.router_aux} and carry is {self.carry}; the auxiliary loss of routers needs whole "
                "rows, so omit one of them"
            )
        if self.mix is not None and not all(math.isfinite(share) and share > 0 for share in self.mix):
            raise TreepackError(f"mix is {', '.join(map(str, self.mix))}; expected positive numbers")
        if not 0 <= self.seed < 2**63:  # torch takes a signed 64-bit seed, numpy none below 0
            raise TreepackError(f"seed is {self.seed}; expected 0 to 2**63 - 1")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise TreepackError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(choices)}")

    def as_record(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        record = asdict(self)
        del record["objective"]["preset"]  # a name for values that the record has anyway
        if not self.objective.has_values:
            del record["objective"]["value_coef"], record["objective"]["value_clip"]
        if self.blocks in (None, 1):
            del record["blocks"]  # the order of a run without blocks depends on none
        for name, usual in (("carry", None), ("checkpoint_layers", None), ("pass_tokens", "auto")):
            if record[name] == usual:
                del record[name]
        if not self.offload_checkpoints:
            del record["offload_checkpoints"]
        if self.routes == "replay":
            del record["routes"]
        return {**record, "betas": list(self.betas), "mix": None if self.mix is None else list(self.mix)}

    @property
    def recomputes(self) -> bool:
        """True if layers are recomputed in the backward pass."""
        return self.gradient_checkpointing or self.offload_checkpoints or self.checkpoint_layers not in (None, 0)

    @property
    def fixed_options(self) -> dict[str, Any]:
        """The options that a resumed run may not change, as JSON values."""
        return {name: value for name, value in self.as_record().items() if name not in CHANGEABLE_ON_RESUME}

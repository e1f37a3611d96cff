"""Options of a training run: all options of `treepack train` except its paths, checked once.

This file imports no numerical library, so that the command line can take its options from here.

The options in `_CHANGEABLE_ON_RESUME` change the speed, memory or safety of a run and may differ when it is resumed.
The options in `LENGTH_OPTIONS` may extend it. All other options change the result and must stay the same.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, SupportsFloat

from treepack.errors import TreepackError
from treepack.model.adapters.lora_options import LoraOptions
from treepack.objectives.objective import Objective
from treepack.option_fields import check_options, expect_type, option

_CHANGEABLE_ON_RESUME = frozenset(
    "checkpoint_layers offload_checkpoints offload_optimizer compile attention carry pass_tokens loss_chunk "
    "device sequence_ranks expert_ranks gather_dtype whole_weights "
    "checkpoint_every keep save_dtype max_skipped".split()
)
# Options that define the number of steps. A resumed run may have more steps than before, or fewer, but not fewer than
# are done.
LENGTH_OPTIONS = frozenset({"steps", "epochs", "patience"})
# The names of `attention.IMPLEMENTATIONS`; that package imports torch, and a page of help must not.
ATTENTION = ("auto", "reference", "flex", "flash", "triton")
DTYPES = ("auto", "fp32", "bf16")
# Options that a run on several ranks chooses if they are "auto".
RANK_OPTIONS = ("sequence_ranks", "expert_ranks", "whole_weights")
ROUTES = ("replay", "ignore")
STATE_BYTES = 8  # both moments of AdamW of a weight
# Bytes of state for each weight, at most. Blocks of 256 numbers with 8 bits have a scale each; AdamW beside Muon, whose
# momentum has 4 bytes, has its moments for embeddings.
_OPTIMIZERS = {"adamw": STATE_BYTES, "adamw8bit": 2 + 2 * 4 / 256, "muon": STATE_BYTES, "sgd": 0}
SCHEDULES = ("cosine", "linear", "constant", "wsd")
CHUNK = 2048  # targets whose logits are in memory at a time
MAX_SEED = 2**63 - 1  # torch takes a signed 64-bit seed, and numpy none below 0


@dataclass(frozen=True)
class TrainOptions:
    """Options of a training run, with the names and defaults of the command line."""

    # Length of the run
    steps: int | None = option(
        None, "Optimiser steps; overrides --epochs. With --resume and a larger number, training continues.", minimum=1
    )
    epochs: int = option(1, "Passes over the rows.", minimum=1)
    rows_per_step: int = option(8, "Rows whose gradients are summed for one update, over all ranks.", minimum=1)
    # Optimiser
    # A rate of 0 only measures losses.
    optimizer: str = option(
        "adamw",
        "AdamW; its form with 8-bit moments (needs bitsandbytes); Muon for matrices of layers and AdamW for the rest; "
        "or SGD without momentum.",
        choices=tuple(_OPTIMIZERS),
    )
    lr: float = option(1e-5, "Maximum learning rate.", minimum=0)
    # With the cosine and the betas below, usual since GPT-3 (arXiv 2005.14165, appendix B).
    schedule: str = option(
        "cosine",
        "Decay of the learning rate after the warm-up: to the last rate by a cosine or a line, none, or wsd: by a line "
        "over the last tenth of the steps.",
        choices=SCHEDULES,
    )
    min_lr_ratio: float = option(0.1, "Last learning rate / maximum.", minimum=0)
    warmup_steps: int = option(0, "Steps of linear warm-up.", minimum=0)
    weight_decay: float = option(
        0.0,
        "Weight decay of all weights except biases, norms, states and other vectors; --dry-run shows the groups.",
        minimum=0,
    )
    betas: tuple[float, float] = option((0.9, 0.95), "Decay of the first and second moments of AdamW.")
    clip: float = option(1.0, "Maximum gradient norm; 0 for no clipping.", minimum=0)
    # Precision, speed and memory
    dtype: str = option(
        "auto",
        "bf16 keeps fp32 weights and computes under autocast; auto is bf16 on a GPU that has it, else fp32. --verify "
        "always computes in fp64 or fp32.",
        choices=DTYPES,
    )
    checkpoint_layers: int | str = option(
        "auto", "Compute the first N layers again in the backward pass, to save memory; all is every layer, 0 none."
    )
    offload_checkpoints: bool | str = option(
        "auto", "Keep inputs and attention outputs of layers that are computed again in host memory until then."
    )
    offload_optimizer: bool | str = option(
        "auto", "Keep the moments of AdamW in host memory between updates; auto does so if a step gets faster by it."
    )
    compile: bool | str = option("auto", "Fuse all of a layer except attention by torch.compile.")
    # Data
    mix: tuple[float, ...] | None = option(
        None,
        "Share of the rows for each PACKED, in their order, such as 0.7,0.3; by default every row of each of them "
        "comes once per epoch.",
    )
    # The order of a run depends on this number, so a resumed run keeps it on any number of machines.
    blocks: int | None = option(
        None,
        "Divide the rows of each training step into this number of blocks of neighbouring rows, so that each machine "
        "downloads only its own; by default the number of machines if PACKED is remote, else 1.",
        minimum=1,
    )
    init_from: str | None = option(
        None, "Start with the weights of another run, of one of its checkpoints, or of a model of the same shapes."
    )
    attention: str = option(
        "auto",
        "reference runs anywhere; flex is FlexAttention, flash its FlashAttention-4 backend, triton treepack's own "
        "kernel; auto is the first of triton, flash and flex that can run on the GPU, else reference.",
        choices=ATTENTION,
    )
    loss_chunk: int | str = option(
        "auto", f"Targets per chunk of logits; a smaller chunk needs less memory, and auto is {CHUNK} if that fits."
    )
    device: str = option("auto", "cpu, cuda or cuda:N; auto is a GPU if there is one.")
    seed: int = option(0, "Seed of row order and random weights.", minimum=0, maximum=MAX_SEED)
    objective: Objective = field(default_factory=Objective)  # the loss to minimise
    sequence_ranks: int | str = option(
        "auto",
        "Ranks that compute each row together: each has 1/R of the tokens, and in attention 1/R of the heads. A "
        "divisor of the number of ranks and of heads; auto is 1 unless a row does not fit on one GPU, or GPUs would be "
        "idle.",
    )
    # Sharded weights; both have no effect in one process
    gather_dtype: str = option(
        "fp32",
        "Dtype of weights sent between ranks; bf16 halves the traffic and rounds all weights, norms too.",
        choices=("fp32", "bf16"),
    )
    expert_ranks: int | str = option(
        "auto",
        "Divide the experts of each layer among this number of ranks, and send tokens to the ranks of their experts. "
        "The run has a multiple of that many ranks; auto is 1 unless no GPU has room to gather the experts.",
    )
    whole_weights: bool | str = option(
        "auto",
        "Keep all weights and gradients on each rank during a step, and exchange them once a step instead of in each "
        "pass; auto does so if a step has several passes and they fit beside them.",
    )
    # Checkpoints and evaluation
    checkpoint_every: int = option(100, "Optimiser steps between checkpoints; 0 for none.", minimum=0)
    # If the newest checkpoint is damaged, the run continues from the one before.
    keep: int = option(2, "Number of checkpoints to keep, the newest ones.", minimum=1)
    save_dtype: str = option(
        "fp32",
        "Weights of the saved model: fp32, or source for the dtype that each has in --model, as engines round them.",
        choices=("fp32", "source"),
    )
    eval_every: int = option(
        100, "Optimiser steps between evaluations of --eval, which also follow the last step.", minimum=1
    )
    patience: int = option(
        0,
        "End the run after this number of evaluations without a lower loss, and take the model of the lowest; 0 for "
        "never.",
        minimum=0,
    )
    lora: LoraOptions | None = None  # trains an adapter only
    dequantize: bool = option(
        False,
        "Read weights that are stored quantised (fp8, mxfp4, bitsandbytes 4 bits) as whole weights, which are trained "
        "and saved as such.",
    )
    router_aux: float = option(
        0.0,
        "Coefficient of the load-balancing loss of a mixture's routers, beside any loss; 0 leaves it out.",
        minimum=0,
    )
    routes: str = option(
        "replay",
        "replay: send each token to the experts that the sampler chose, if build-trie kept them; ignore: do not.",
        choices=ROUTES,
    )
    carry: int | str | None = option(
        "auto",
        "Run a row of more than N tokens in pieces of at most N, so that memory limits the piece and not the row; off "
        "runs every row as a whole.",
    )
    pass_tokens: int | str = option(
        "auto", "Join short rows of a step into passes of at most N tokens, which are faster on a GPU; 1 joins none."
    )
    # More such steps mean that the model has diverged for good.
    max_skipped: int = option(
        5,
        "Maximum number of consecutive steps that are skipped because their loss or gradient is not finite.",
        minimum=0,
    )

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        check_options(self)
        expect_type(self.objective, Objective, "TrainOptions: objective", 'choose_objective("grpo")')
        expect_type(self.lora or LoraOptions(), LoraOptions, "TrainOptions: lora", "LoraOptions(rank=8)")
        layers = self.checkpoint_layers
        if layers not in ("auto", "all") and not (isinstance(layers, int) and layers >= 0):
            raise TreepackError(f"checkpoint_layers is {layers!r}; expected a number of layers, all or auto")
        if self.optimizer != "adamw":
            if self.offload_optimizer is True:
                raise TreepackError("offload_optimizer moves the moments of AdamW; use optimizer adamw, or omit it")
            object.__setattr__(self, "offload_optimizer", False)
        if layers == 0 and self.offload_checkpoints is True:
            raise TreepackError("offload_checkpoints offloads recomputed layers and checkpoint_layers is 0; omit one")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise TreepackError(f"betas is {', '.join(map(str, self.betas))}; expected two numbers from 0 to below 1")
        _check_number("sequence_ranks", self.sequence_ranks, "ranks")
        _check_number("expert_ranks", self.expert_ranks, "ranks")
        for name in ("compile", "offload_checkpoints", "offload_optimizer", "whole_weights"):
            if getattr(self, name) != "auto" and not isinstance(getattr(self, name), bool):  # 1 == True
                raise TreepackError(f"{name} is {getattr(self, name)!r}; expected True, False or auto")
        check_tokens(self.carry, self.pass_tokens)
        _check_number("loss_chunk", self.loss_chunk, "targets")
        if self.save_dtype == "source" and self.lora is not None and not self.lora.merge:
            raise TreepackError(
                "save_dtype source is for whole models, and an adapter is saved in fp32; omit it or merge"
            )
        shares = () if self.mix is None else self.mix
        if not all(isinstance(share, SupportsFloat) and 0 < share < math.inf for share in shares):
            raise TreepackError(f"mix is {', '.join(map(str, shares))}; expected positive numbers")
        # 9,1 and 0.9,0.1 are the same run. Shares with the sum 1 stay, so that options made again are equal.
        if self.mix is not None and not math.isclose(sum(self.mix), 1):
            ratios = [Fraction(str(share)) for share in self.mix]
            object.__setattr__(self, "mix", tuple(float(ratio / sum(ratios)) for ratio in ratios))

    def as_record(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        record = {**asdict(self), "objective": self.objective.as_record()}
        if self.blocks in (None, 1):
            del record["blocks"]  # the order of a run without blocks depends on none
        if self.routes == "replay":
            del record["routes"]
        # Runs of before these options have no record of them.
        for name, default in (("dequantize", False), ("optimizer", "adamw"), ("schedule", "cosine")):
            if record[name] == default:
                del record[name]
        if self.ranks_of_experts == 1:
            del record["expert_ranks"]
        if self.whole_weights is not True:
            del record["whole_weights"]
        return {**record, "betas": list(self.betas), "mix": None if self.mix is None else list(self.mix)}

    @property
    def state_bytes(self) -> float:
        """The bytes of the optimiser's state for a trained weight, at most."""
        return _OPTIMIZERS[self.optimizer]

    @property
    def piece_limit(self) -> int | None:
        """The tokens of a piece; None if every row runs as a whole, and before they are chosen."""
        return self.carry if isinstance(self.carry, int) else None

    @property
    def ranks_of_row(self) -> int:
        """The ranks that compute a row together; one before they are chosen."""
        return 1 if self.sequence_ranks == "auto" else int(self.sequence_ranks)

    @property
    def ranks_of_experts(self) -> int:
        """The ranks that divide the experts of a layer; one before they are chosen."""
        return 1 if self.expert_ranks == "auto" else int(self.expert_ranks)

    @property
    def fixed_options(self) -> dict[str, Any]:
        """The options that a resumed run may not change, as JSON values."""
        return {name: value for name, value in self.as_record().items() if name not in _CHANGEABLE_ON_RESUME}

    @property
    def free_options(self) -> dict[str, Any]:
        """The options that a resumed run may change, as JSON values."""
        return {name: value for name, value in self.as_record().items() if name in _CHANGEABLE_ON_RESUME}


def stored_use(options: TrainOptions, *, adapted: bool) -> dict[str, bool]:
    """Return the arguments of `stored_weights.check_stored` for a run, whose model is an adapter if `adapted`."""
    lora = options.lora or LoraOptions()
    trained = lora.rank is None and not adapted
    return {"trained": trained, "quantize": bool(lora.quantize), "merge": lora.merge, "dequantize": options.dequantize}


def check_tokens(carry: int | str | None, pass_tokens: int | str) -> None:
    """Refuse values that are not numbers of tokens of a piece and of a pass.

    Raises:
        TreepackError: with the value.
    """
    if carry not in (None, "auto") and not (isinstance(carry, int) and carry >= 1):
        raise TreepackError(f"carry is {carry!r}; expected a number of tokens of at least 1, auto or None")
    _check_number("pass_tokens", pass_tokens, "tokens")


def _check_number(name: str, value: int | str, unit: str) -> None:
    if value != "auto" and not (isinstance(value, int) and value >= 1):
        raise TreepackError(f"{name} is {value!r}; expected a number of {unit} of at least 1, or auto")

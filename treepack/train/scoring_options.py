"""Options of the commands that run a trained model over data: `treepack logprobs` and `treepack critic`.

This file imports no numerical library, so that the command line can take its options from here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from treepack.errors import TreepackError
from treepack.objectives.objective import GREEDY
from treepack.option_fields import check_options, option
from treepack.train.options import ATTENTION, CHUNK, DTYPES, MAX_SEED, ROUTES, check_tokens

# Tokens of a piece with `carry` "auto". Longer pieces are not faster: without gradients each token runs once anyway.
AUTO_PIECE = 8192
_PASS_TOKENS = (
    "Join consecutive rows into passes of at most N tokens, which are faster on a GPU; auto is 32768 there, and 1 runs "
    "every row alone, as auto does on the CPU."
)


@dataclass(frozen=True)
class ScoreOptions:
    """The columns that `treepack logprobs` writes, and options of the model."""

    column: str = option(
        "old",
        "old: the policy before training, the denominator of ratios. ref: the reference of KL and dpo. teacher: the "
        "teacher of a distillation.",
        choices=("old", "ref", "teacher"),
    )
    top_k: int | None = option(
        None, "Also write the N likeliest tokens of the teacher at each trained token, for --distill.", minimum=1
    )
    groups: str | None = option(
        None,
        "Regular expression: write only the trajectories whose group it matches from the start, and keep the values of "
        "the others, such as the values that a first teacher has written.",
    )
    # Rounds the model as `LoraOptions` do.
    quantize: str | None = option(
        None, "Round the linear layers of an adapter's base to 4 bits (needs bitsandbytes).", choices=("nf4",)
    )
    entropies: bool = option(False, "Also write the entropy of the distribution of each token.")
    # Of softmax(logits / temperature), for terms without a temperature of their own; 1 by default.
    temperature: float | None = option(
        None, "As in treepack train: the sampler's temperature, if the data does not have it."
    )
    ignore_temperature: bool = option(False, "Compute at the temperature 1, which dpo needs, for all data.")
    carry: int | str | None = option(
        None,
        "Run a row of more than N tokens in pieces of at most N, so that memory limits the piece and not the row; auto "
        "is 8192, and off runs every row as a whole.",
    )
    pass_tokens: int | str = option("auto", _PASS_TOKENS)
    routes: str = option("replay", "As in treepack train.", choices=ROUTES)
    dtype: str = option("auto", "As in treepack train.", choices=DTYPES)
    attention: str = option("auto", "As in treepack train.", choices=ATTENTION)
    loss_chunk: int = option(CHUNK, "Tokens per chunk of logits; a smaller chunk needs less memory.", minimum=1)
    device: str = option("auto", "cpu, cuda or cuda:N; auto is a GPU if there is one.")
    seed: int = option(0, "Seed of random weights.", minimum=0, maximum=MAX_SEED)
    sequence_ranks: int = option(
        1, "Processes of torchrun that compute every row together; each has the whole model.", minimum=1
    )

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        check_options(self)
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise TreepackError(f"temperature is {self.temperature}; expected a finite number above 0{GREEDY}")
        check_tokens(self.carry, self.pass_tokens)
        if self.top_k is not None and self.column != "teacher":
            raise TreepackError(f"top_k is about the column teacher, and the column is {self.column}; omit one of them")
        try:
            re.compile(self.groups or "")
        except re.error as error:
            raise TreepackError(f"groups is {self.groups!r}, which is not a regular expression: {error}") from None
        if self.temperature is not None and self.ignore_temperature:
            raise TreepackError("temperature and ignore_temperature exclude each other; omit one of them")


@dataclass(frozen=True)
class CriticOptions:
    """Options of `treepack critic`: rows, pieces and precision."""

    capacity: int | None = option(
        None,
        "Maximum number of tokens in a row; larger trees take several rows. By default as in treepack pack.",
        minimum=1,
    )
    carry: int | str | None = option(
        None,
        "Put each tree into one row, and run a row of more than N tokens in pieces of at most N, so that each tree "
        "token runs once; auto is 8192, and off runs every row as a whole.",
    )
    pass_tokens: int | str = option("auto", _PASS_TOKENS)
    routes: str = option("replay", "As in treepack train.", choices=ROUTES)
    dtype: str = option("auto", "As in treepack train; the value head computes in fp32.", choices=DTYPES)
    attention: str = option("auto", "As in treepack train.", choices=ATTENTION)
    device: str = option("auto", "cpu, cuda or cuda:N; auto is a GPU if there is one.")

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        check_options(self)
        check_tokens(self.carry, self.pass_tokens)
        if self.capacity is not None and self.carry is not None:
            raise TreepackError("capacity limits rows, and with carry each tree is one row; give one of them")


def piece_size(carry: int | str | None) -> int | None:
    """Return the tokens of a piece; None if every row runs as a whole."""
    return AUTO_PIECE if isinstance(carry, str) else carry

"""One loss as a value: its names, its formula, and the columns it reads; each file of `treepack.losses` defines one.

    Loss(name, presets, over, surrogate, whole, options, constants, reads)

    over      the numbers that the loss is a sum of                 surrogate gets           losses
    weights   weight times log-probability of each token            (none)                   sft
    terms     one number for each (trajectory, trained token)       TermNumbers, Objective   all policy losses
    pairs     one number for each pair of rollouts                  differences, Objective   dpo
    values    the value loss of each term                           (none)                   value

Nothing else in the library depends on the name of a loss. This file needs no torch, and neither do the files of losses:
they call methods of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from treepack.errors import TreepackError

# Options that a loss has without naming them, by `over`.
_COMMON: dict[str, frozenset[str]] = {
    "weights": frozenset(),
    "terms": frozenset(
        "denominator response_length kl kl_estimator entropy importance_cap importance_floor importance_mask "
        "importance_level sequence_of sequence_mask old_logprobs temperature value_coef value_clip distill "
        "distill_beta teacher_kl teacher_baseline teacher".split()
    ),
    "pairs": frozenset(),
    "values": frozenset({"denominator", "response_length", "value_clip"}),
}
# Options that only some losses read, and name in `Loss.options`.
CLIPS = frozenset({"clip_low", "clip_high"})
_OWN = CLIPS | {"dual_clip", "beta"}


def _readable() -> frozenset[str]:
    """Return the columns that a loss may require: a number for each term or trajectory."""
    from treepack.columns import BY_PACKED  # needs numpy, which the help of commands does not import

    return frozenset(name for name, column in BY_PACKED.items() if column.remedy and column.is_in_batches)


@dataclass(frozen=True)
class Preset:
    """A name of `--loss`: usual values of options, and the line of the loss in docs/objectives.md."""

    values: Mapping[str, Any]  # options of `Objective` that differ from its defaults; `rewarded` too
    formula: str = ""  # the loss of a term, in Markdown
    source: str = ""  # the paper, with a link
    elsewhere: str = ""  # names in other trainers


@dataclass(frozen=True)
class Whole:
    """A number of each trajectory: the mean or sum of a number of its trained tokens, computed without a gradient.

    Attributes:
        of: gets `TermNumbers` of n terms and the `Objective`; returns the numbers that are added up, float64 [n].
        mean: divide the sum by the number of trained tokens.
        bounds: minimum and maximum of the result; None for no bounds.
    """

    of: Callable[[Any, Any], Any]
    mean: bool = True
    bounds: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss; see the header of this file and "Add a loss" in CONTRIBUTING.md.

    Attributes:
        name: the name in run.json, which is also one of `presets`.
        presets: the names of `--loss` that select it.
        over: the numbers that the loss sums; see the header.
        surrogate: the quantity to maximise. Over terms, from `surrogates.TermNumbers` of n terms and the `Objective`,
            a `surrogates.Surrogate`. Over pairs, from the P differences between the shifts of the chosen and the
            rejected rollout and the `Objective`, float64 [P]. The number of a term or pair must not depend on others.
        whole: a number of the trajectory of each term, which the surrogate reads as `TermNumbers.whole`.
        options: options that the loss reads, besides the common ones of all losses over the same.
        constants: numbers of the loss alone with their usual values, which `--loss-constant` changes.
        bounds: minimum and maximum of a constant; a constant without them is a finite number above 0.
        reads: columns of `schema.TERMS` that the loss always requires; `TermNumbers.columns` has them.
        has_ratio: False if the surrogate does not read old log-probabilities.
        weighs_sampler: True if the surrogate has the sampler's ratio, so that no importance weight multiplies it.
        package: name and version of the package that has the loss; None for the losses of treepack.
    """

    name: str
    presets: Mapping[str, Preset]
    over: Literal["weights", "terms", "pairs", "values"] = "terms"
    surrogate: Callable[[Any, Any], Any] | None = None
    whole: Whole | None = None
    options: frozenset[str] = frozenset()
    constants: Mapping[str, float] = field(default_factory=dict)
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    has_ratio: bool = True
    weighs_sampler: bool = False
    package: str | None = None

    def __post_init__(self) -> None:
        """Refuse a loss whose parts contradict each other."""
        needs_surrogate = self.over in ("terms", "pairs")
        known, readable = self.available_options | {"rewarded"}, _readable() if self.reads else frozenset[str]()
        unreadable = {*self.reads} - readable
        faults = {
            f"over is {self.over!r}; expected one of {', '.join(_COMMON)}": self.over not in _COMMON,
            "its name is not in presets; add it": self.name not in self.presets,
            "a name is not made of letters, digits and _": not all(each.isidentifier() for each in self.presets),
            f"it is over {self.over} and has no surrogate; give one": needs_surrogate and self.surrogate is None,
            f"it is over {self.over}, which reads no surrogate and no whole; give neither": not needs_surrogate
            and (self.surrogate or self.whole),
            "it is over pairs, which reads no whole; give none": self.over == "pairs" and self.whole is not None,
            f"options has {_listed(self.options - _OWN)}; expected some of {_listed(_OWN)}": self.options - _OWN,
            f"reads has {_listed(unreadable)}; expected some of {_listed(readable)}": unreadable,
            "bounds names a constant that is not there; add it to constants": {*self.bounds} - {*self.constants},
        }
        for preset in self.presets.values():
            unknown = {*preset.values} - known
            faults[f"a preset sets {_listed(unknown)}; expected options of the loss"] = unknown
        for fault, is_found in faults.items():
            if is_found:
                raise TreepackError(f"the loss {self.name}: {fault}")

    @property
    def available_options(self) -> frozenset[str]:
        """Names of all options of the loss; `choose_objective` refuses all others."""
        constants = {"loss_constants"} if self.constants else set()
        return _COMMON.get(self.over, frozenset()) | self.options | constants

    def check_constant(self, name: str, value: float) -> None:
        """Refuse a constant that the loss does not have, or a value out of its bounds.

        Raises:
            TreepackError: with the names that the loss has, or with the bounds.
        """
        if name not in self.constants:
            remedy = f"it has {', '.join(self.constants)}" if self.constants else "it has none"
            raise TreepackError(f"{name} is not a constant of the loss {self.name}; {remedy}")
        if name in self.bounds:
            low, high = self.bounds[name]
            if not low <= value <= high:
                raise TreepackError(f"the constant {name} is {value:g}; expected {low:g} to {high:g}")
        elif not 0 < value < math.inf:
            raise TreepackError(f"the constant {name} is {value:g}; expected a finite number above 0")


def paper(name: str, number: str) -> str:
    """Return a link to a paper on arXiv."""
    return f"[{name}](https://arxiv.org/abs/{number})"


def _listed(names: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(names))

"""A loss with its options: the names, the usual values of each loss, and the columns that it needs.

    name | preset, options --choose_objective--> Objective

`objectives` has the formulas, the papers and the losses themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from treepack.errors import TreepackError
from treepack.objectives.factors import DENOMINATORS, Denominator
from treepack.objectives.loss import CLIPS, Loss
from treepack.objectives.registry import find_loss
from treepack.option_fields import check_options, option

_ESTIMATORS = ("k1", "k2", "k3", "unbiased")
_LEVELS = ("token", "sequence", "geometric")

GREEDY = ", because ratios need the probabilities of a sampler, and greedy sampling has none"

# Options about a teacher.
_DISTILLATION = ("distill", "distill_beta", "teacher_kl", "teacher_baseline", "teacher", "rewarded")


@dataclass(frozen=True)
class Objective:
    """A loss with its options; `choose_objective` fills in the usual values of a loss."""

    # The name of a `Loss`; a command also takes the names of its presets.
    loss: str = option(
        "sft",
        "Loss to minimise: weighted cross-entropy (sft), an objective over terms, or the value loss of a critic alone "
        "(value).",
    )
    clip_low: float = option(0.2, "Clip ratios below 1 minus this.", minimum=0)
    clip_high: float = option(0.2, "Clip ratios above 1 plus this.", minimum=0)
    # A bound below 1 would bound the loss at ratio 1 already, without a gradient if the advantage is negative.
    dual_clip: float | None = option(None, "Maximum ratio if the advantage is negative.", minimum=1)
    denominator: str = option(
        "token",
        "Unit that has equal weight in a step; rollout counts a rollout once, however many trajectories it became, "
        "global divides by trajectories times --response-length, and edge is the objective of TreeRPO, for advantages "
        "with --edges.",
        choices=tuple(DENOMINATORS),
    )
    response_length: int = option(
        1, "Constant of --denominator global, the maximum length of Dr. GRPO; 1 if it is not given.", minimum=1
    )
    kl: float = option(0.0, "Coefficient of the KL divergence from the reference.", minimum=0)
    kl_estimator: str = option(
        "k3",
        "Estimator of the KL divergence; unbiased is k3 times the ratio of the current and the old policy.",
        choices=_ESTIMATORS,
    )
    entropy: float = option(0.0, "Coefficient of the entropy bonus.", minimum=0)
    importance_cap: float | None = option(
        None, "Weight terms by old / sampling probability, with this maximum.", minimum=0
    )
    importance_floor: float = option(0.0, "Minimum of the weight of --importance-cap.", minimum=0)
    importance_mask: tuple[float, float] | None = option(
        None, "Leave out terms whose old / sampling probability is outside of LOW,HIGH."
    )
    importance_level: str = option(
        "token",
        "Compute old / sampling probability for each token, as the product over a trajectory (sequence), or as its "
        "geometric mean.",
        choices=_LEVELS,
    )
    sequence_of: str = option(
        "trajectory",
        "Sequence of ratios, masks, and the denominators trajectory and global: a trajectory, or all trajectories of a "
        "rollout, which must be in one row.",
        choices=("trajectory", "rollout"),
    )
    sequence_mask: float | None = option(
        None,
        "Leave out terms with a negative advantage if the mean of log sampling / current probability over their "
        "trajectory is larger than this.",
        minimum=0,
    )
    # `train` chooses one of the others; elsewhere auto is recorded.
    old_logprobs: str = option(
        "auto",
        "Denominator of ratios: the recorded old log-probabilities, or those of the sampler (verl's bypass mode); auto "
        "is sampler if the rows have only those and several updates use one batch of rollouts, else recorded.",
        choices=("auto", "recorded", "sampler"),
    )
    # Pairs of a name of `Loss.constants` and its value; empty for the usual ones. `choose_objective` takes a dict.
    loss_constants: tuple[tuple[str, float], ...] = option(
        (),
        "Change a constant of the loss, such as temperature_neg of sapo; docs/objectives.md lists them. May be "
        "repeated.",
    )
    beta: float = option(0.1, "Inverse temperature of dpo, or weight of the squared log ratio of dro.", minimum=0)
    # For terms that have none; 1 if None. sft and dpo always compute at 1.
    temperature: float | None = option(
        None, "The sampler's temperature, if the data does not have it; it is an error if the data has another one."
    )
    value_coef: float = option(
        0.0, "Coefficient of the value loss beside a policy loss; one model then learns policy and values.", minimum=0
    )
    value_clip: float = option(
        0.2,
        "Maximum distance of a value from its old value in the value loss, 0.2 by default; 0 clips nothing.",
        minimum=0,
    )
    distill: float = option(
        0.0, "Coefficient of the divergence between the laws of student and teacher; 1 with --loss distill.", minimum=0
    )
    distill_beta: float = option(
        1.0,
        "Divergence of --distill: 0 is the forward KL, 1 (the default) the reverse KL, and a number between them the "
        "generalised Jensen-Shannon divergence (GKD).",
        minimum=0,
        maximum=1,
    )
    teacher_kl: float = option(
        0.0,
        "Add this times log teacher - student probability of the sampled token to its advantage; 1 with --loss opd.",
        minimum=0,
    )
    teacher_baseline: bool = option(
        False, "Subtract the mean over the student's law from the part of --teacher-kl, for less variance."
    )
    teacher: str | None = option(
        None,
        "Model that computes its laws of all words while the student trains; by default the rows have the columns of "
        "treepack logprobs --column teacher.",
    )
    # False leaves out the advantages of the data; the presets opd and distill set it.
    rewarded: bool = True
    preset: str | None = field(default=None, compare=False)  # the name that `choose_objective` got, for messages

    def __post_init__(self) -> None:
        """Refuse values outside the range of an option."""
        if find_loss(str(self.loss)).name != self.loss:
            raise TreepackError(f"loss is {self.loss!r}, a preset; use choose_objective({self.loss!r})")
        check_options(self)
        if self.importance_cap == 0:
            raise TreepackError("importance_cap is 0, so that no term has a weight; expected a number above 0")
        if self.importance_cap is not None and self.importance_cap < self.importance_floor:
            raise TreepackError(
                f"importance_floor is {self.importance_floor:g} and importance_cap {self.importance_cap:g}; expected a "
                "minimum that is at most the maximum"
            )
        if self.importance_mask is not None:
            low, high = self.importance_mask
            if not 0 <= low <= high or low == math.inf:
                raise TreepackError(f"importance_mask is {low:g},{high:g}; expected 0 <= LOW <= HIGH")
        for name, value in self.loss_constants:
            self.definition.check_constant(name, value)
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise TreepackError(f"temperature is {self.temperature}; expected a finite number above 0{GREEDY}")
        if not (self.rewarded or self.distill or self.teacher_kl):
            raise TreepackError(f"distill and teacher_kl are 0, so the loss {self.name} trains nothing; give one")
        if self.teacher_baseline and not self.teacher_kl:
            raise TreepackError("teacher_baseline is part of teacher_kl, which is 0; give both, or neither")
        if self.teacher_baseline and self.distill and self.distill_beta != 1:
            raise TreepackError(
                f"teacher_baseline needs the reverse KL, and distill_beta is {self.distill_beta:g}; set it to 1"
            )
        if self.teacher is not None and not (self.reads_law or self.teacher_kl):
            raise TreepackError("distill and teacher_kl are 0, so the teacher has no use; give one, or no teacher")

    @property
    def name(self) -> str:
        """The name of the loss in messages: the preset if there is one, else `loss`."""
        return self.preset or self.loss

    @property
    def definition(self) -> Loss:
        """The loss itself."""
        return find_loss(self.loss)

    @property
    def weighing(self) -> Denominator:
        """The denominator itself; its unit is the rollout if a sequence is one."""
        chosen = DENOMINATORS[self.denominator]
        is_by_rollout = self.sequence_of == "rollout" and chosen.unit == "trajectory"
        return chosen._replace(unit="rollout") if is_by_rollout else chosen

    @property
    def is_by_rollout(self) -> bool:
        """True if the loss depends on which trajectories belong to one rollout; False for pairs, which always do."""
        return not self.has_pairs and "rollout" in (self.sequence_of, self.denominator)

    @property
    def constants(self) -> dict[str, float]:
        """The constants of the loss, with their usual values where none is given."""
        return {**self.definition.constants, **dict(self.loss_constants)}

    @property
    def has_terms(self) -> bool:
        """True if the loss is about (trajectory, trained token) pairs; False for a sum over tokens of rows."""
        return self.definition.over != "weights"

    @property
    def is_policy(self) -> bool:
        """True if the loss is about the sampled distribution: it reads advantages, and old log-probabilities if any."""
        return self.definition.over == "terms"

    @property
    def has_pairs(self) -> bool:
        """True if the loss compares rollouts of a group, at the temperature 1."""
        return self.definition.over == "pairs"

    @property
    def reads_logprobs(self) -> bool:
        """True if the loss reads log-probabilities; False for the value loss of a critic alone."""
        return self.definition.over != "values"

    @property
    def is_tokenwise(self) -> bool:
        """True if the slope of the loss by a log-probability depends on that log-probability and its entropy alone."""
        return self.is_policy and not self.reads_trajectories

    @property
    def reads_trajectories(self) -> bool:
        """True if the loss of a term depends on log-probabilities of other tokens of its trajectory."""
        by_sequence = self.importance_level != "token" and self.corrects_sampler
        reads_whole = self.has_pairs or self.definition.whole is not None
        return reads_whole or by_sequence or self.sequence_mask is not None

    @property
    def corrects_sampler(self) -> bool:
        """True if terms are weighted or left out by old / sampling probability."""
        return self.importance_cap is not None or self.importance_mask is not None

    @property
    def has_advantages(self) -> bool:
        """True if terms have advantages, of the data or of a teacher; False for a divergence alone."""
        return self.is_policy and (self.rewarded or self.teacher_kl > 0)

    @property
    def reads_law(self) -> bool:
        """True if the loss compares the laws of student and teacher."""
        return self.distill > 0 or self.teacher_baseline

    @property
    def law_beta(self) -> float | None:
        """The beta of the divergence that is computed, None if the loss reads none."""
        return None if not self.reads_law else 1.0 if self.teacher_baseline else self.distill_beta

    @property
    def clips(self) -> bool:
        """True if the loss may bound terms by their ratio; a loss of a package may do so without an option."""
        return bool(self.definition.options & CLIPS) or self.definition.package is not None

    @property
    def has_ratio(self) -> bool:
        """True if the loss reads old log-probabilities."""
        has_ratio = self.has_advantages and self.definition.has_ratio
        return has_ratio or self.teacher_kl > 0 or (self.kl > 0 and self.kl_estimator == "unbiased")

    @property
    def has_values(self) -> bool:
        """True if the loss reads values, so that the model has a value head."""
        return not self.reads_logprobs or self.value_coef > 0

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of `schema.TERMS` that the loss requires."""
        if not self.has_terms:
            return ()
        if self.has_pairs:
            return tuple(dict.fromkeys(("term_ref_logprob", "trajectory_rewards", *self.definition.reads)))
        required = {
            "term_advantage": self.is_policy and self.rewarded,
            "term_teacher_logprob": self.teacher_kl > 0 and self.teacher is None,
            "term_teacher_topk_logprobs": self.reads_law and self.teacher is None,
            "term_ref_logprob": self.is_policy and self.kl > 0,
            "term_sampling_logprob": self.corrects_sampler
            or self.sequence_mask is not None
            or self.old_logprobs == "sampler",
            "term_return": self.has_values,
            **({} if self.weighing.column is None else {self.weighing.column: True}),
            **dict.fromkeys(self.definition.reads, True),
        }
        return tuple(name for name, is_required in required.items() if is_required)

    def as_record(self) -> dict[str, Any]:
        """Return the loss and the options that it reads, as JSON values."""
        read = self.definition.available_options | {"loss"} | ({"rewarded"} if self.is_policy else set())
        if self.sequence_of == "trajectory":
            read -= {"sequence_of"}  # runs of before this option have no record of it
        record = {name: value for name, value in asdict(self).items() if name in read}
        values = {"loss_constants": dict(self.loss_constants), "importance_mask": _as_list(self.importance_mask)}
        return {name: values.get(name, value) for name, value in record.items()}


def choose_objective(name: str, **options: Any) -> Objective:
    """Return the objective called `name`, a loss or another preset of one, such as dapo.

    An option that is missing or None gets the usual value of the loss.

    Raises:
        TreepackError: if the name is unknown, the loss lacks an option, or a value is out of range.
    """
    loss = find_loss(name)
    usual, available = {"loss": loss.name, **loss.presets[name].values}, loss.available_options
    changes = {option: value for option, value in options.items() if value is not None}
    unknown = sorted(changes.keys() - available)
    if unknown:
        remedy = f"it has {', '.join(sorted(available))}" if available else "it has no options"
        if loss.over == "weights" and unknown[0] in _DISTILLATION:
            remedy = "take the loss distill, or a policy loss"
        raise TreepackError(f"{unknown[0]} is not an option of the loss {name}; {remedy}")
    if "distill_beta" in changes and not {**usual, **changes}.get("distill"):
        raise TreepackError("distill_beta is about the divergence, which has no weight; give distill too, or neither")
    constants: Mapping[str, float] = changes.get("loss_constants", {})
    changes |= {"loss_constants": tuple(sorted(dict(constants).items()))} if "loss_constants" in changes else {}
    objective = Objective(**{**usual, **changes}, preset=name)
    _refuse_unused(objective, changes)
    return objective


def _as_list(bounds: tuple[float, float] | None) -> list[float] | None:
    return None if bounds is None else list(bounds)


def _refuse_unused(objective: Objective, given: Mapping[str, Any]) -> None:
    """Refuse given options that have no effect beside the others."""
    weighs_sampler = objective.definition.weighs_sampler
    reads_level = objective.importance_mask is not None or (objective.importance_cap is not None and not weighs_sampler)
    owner = f" except in {objective.loss}" if weighs_sampler else ""
    uses = {
        "kl_estimator": (objective.kl > 0, "is about the divergence, which has no weight; give kl too"),
        "response_length": (objective.weighing.has_length, "belongs to the denominator global; choose that too"),
        "importance_floor": (objective.importance_cap is not None, "bounds importance_cap from below; give it too"),
        "importance_level": (
            reads_level,
            f"is the level of importance_mask, and of importance_cap{owner}; give one of them too",
        ),
        "sequence_of": (
            objective.reads_trajectories,
            f"is about ratios and masks of sequences, which {objective.name} with these options does not have; choose "
            "the denominator rollout instead",
        ),
        "value_clip": (objective.has_values, "is about the value loss, which has no weight; give value_coef too"),
        **dict.fromkeys(
            ("importance_cap", "importance_mask", "sequence_mask"),
            (objective.has_advantages, f"weighs advantages, which {objective.name} does not have; give teacher_kl too"),
        ),
    }
    for name, (is_used, text) in uses.items():
        if name in given and not is_used:
            raise TreepackError(f"{name} {text}, or neither")
    if objective.old_logprobs == "sampler" and objective.corrects_sampler:
        raise TreepackError(
            "old_logprobs is sampler, so ratios correct the sampler already; omit importance_cap and importance_mask, "
            "or take recorded"
        )
    if objective.old_logprobs == "sampler" and not objective.has_ratio:
        raise TreepackError(f"the loss {objective.name} has no ratio, so old_logprobs has no effect; omit it")
    if objective.has_values and objective.weighing.column is not None:
        raise TreepackError("no estimator writes edges beside the returns of values; choose another denominator")

"""Options of `treepack train` that define the loss."""

from __future__ import annotations

from typing import Any

import click

from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.other_losses import OTHER_LOSSES
from treepack.objectives.registry import all_losses, presets_of

from .choices import WordChoice
from .option_groups import field_options, option_group

_NAMES = (
    "clip_low clip_high dual_clip denominator response_length kl kl_estimator entropy importance_cap importance_floor "
    "importance_mask importance_level sequence_of sequence_mask old_logprobs temperature beta loss_constants "
    "value_coef value_clip distill distill_beta teacher_kl teacher_baseline teacher"
)


class _LossChoice(WordChoice):
    """The presets; names that only other trainers have are refused with the name here, or a reason."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        name = str(value).replace("-", "_")
        if name in OTHER_LOSSES and name not in self.choices:
            self.fail(OTHER_LOSSES[name], param, ctx)
        return super().convert(value, param, ctx)


def _parse_constants(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, float] | None:
    constants: dict[str, float] = {}
    for text in values:
        name, number = (text.partition("=")[i] for i in (0, 2))
        try:
            value = float(number)
        except ValueError as error:
            message = f"{text!r} is not NAME=VALUE, such as temperature_neg=1.1"
            raise click.BadParameter(message, param=parameter) from error
        if constants.setdefault(name, value) != value:
            raise click.BadParameter(f"{name} has two values; give one of them", param=parameter)
    return constants or None


# Without defaults, because the defaults depend on the loss, and an option that the loss does not use is refused.
_CHANGES: dict[str, dict[str, Any]] = {
    **{name: {"default": None, "show_default": False} for name in _NAMES.split()},
    "loss": {"type": _LossChoice(list(presets_of(all_losses())))},
    "loss_constants": {
        "name": "loss-constant",
        "type": str,
        "multiple": True,
        "default": (),
        "show_default": False,
        "metavar": "NAME=VALUE",
        "callback": _parse_constants,
    },
    "temperature": {"type": click.FloatRange(min=0)},
    "teacher_baseline": {"is_flag": True, "default": None},
    "teacher": {"metavar": "DIR|NAME"},
}

objective_options = option_group(
    "objective",
    field_options(Objective, f"loss {_NAMES}", **_CHANGES),
    lambda loss, **changes: choose_objective(loss, **changes),
)
"""Adds the options to a command, which receives them as `objective: Objective`."""

"""Options of `treepack train` that define the loss."""

from __future__ import annotations

from typing import Any

import click

from treepack.objectives.objective import PRESETS, Objective, choose_objective

from .choices import WordChoice
from .option_groups import field_options, option_group

_NAMES = (
    "clip_low clip_high dual_clip denominator response_length kl kl_estimator entropy importance_cap importance_mask "
    "importance_level sequence_mask temperature beta value_coef value_clip distill distill_beta teacher_kl "
    "teacher_baseline teacher"
)
# Without defaults, because each loss has its own, and an option that the loss does not use is refused.
_CHANGES: dict[str, dict[str, Any]] = {
    **{name: {"default": None, "show_default": False} for name in _NAMES.split()},
    "loss": {"type": WordChoice(PRESETS)},
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

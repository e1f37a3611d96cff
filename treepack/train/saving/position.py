"""The position of a run between two steps, which is the JSON of a checkpoint, and the end of a run without progress.

Position() --after(skipped=False)--> --scored(loss)--> ... --as_record--> {"step": 7, "skipped": 0, "score": {...}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from treepack.errors import TreepackError
from treepack.train.run import TrainingRun


@dataclass(frozen=True)
class HeldOutScore:
    """The evaluations of a run so far: the lowest loss and its step, and the number of evaluations after it."""

    best_loss: float | None = None
    best_step: int = 0
    stale: int = 0

    def after(self, step: int, loss: float) -> Self:
        """Return the score after the evaluation of `step`; a loss that is not finite does not improve it."""
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            return type(self)(loss, step, 0)
        return type(self)(self.best_loss, self.best_step, self.stale + 1)

    def is_over(self, patience: int) -> bool:
        """Return true if `patience` evaluations in a row had no lower loss; patience 0 never ends a run."""
        return 0 < patience <= self.stale


@dataclass(frozen=True)
class Position:
    """The number of steps done, that of skipped steps in a row before this position, and the evaluations so far."""

    step: int = 0
    skipped: int = 0
    score: HeldOutScore = field(default_factory=HeldOutScore)

    def after(self, *, skipped: bool) -> Self:
        """Return the position after one more step, which changed no weights if it was `skipped`."""
        # Only consecutive skips count: one bad row per epoch is tolerable, a diverged model skips every step.
        return replace(self, step=self.step + 1, skipped=self.skipped + 1 if skipped else 0)

    def scored(self, loss: float) -> Self:
        """Return the position after an evaluation with this loss."""
        return replace(self, score=self.score.after(self.step, loss))

    def is_due(self, every: int) -> bool:
        """Return true at each multiple of `every` steps; never if it is 0."""
        return every > 0 and self.step % every == 0

    def is_last(self, run: TrainingRun) -> bool:
        """Return true after the last step of the schedule."""
        return self.step >= len(run.schedule)

    def is_over(self, run: TrainingRun) -> bool:
        """Return true if the run has no step after this one: the schedule or the patience ended."""
        return self.is_last(run) or self.score.is_over(run.options.patience)

    def best(self, run: TrainingRun) -> int | None:
        """Return the step whose weights a run with patience keeps, 0 before it has one; None without patience."""
        return self.score.best_step if run.options.patience else None

    def as_record(self) -> dict[str, Any]:
        """Return JSON values from which `from_record` makes an equal position."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], source: Any) -> Self:
        """Return the position of a record; `source` names it in errors.

        Raises:
            TreepackError: the record is not that of a position.
        """
        try:
            position = cls(**{**record, "score": HeldOutScore(**record["score"])})
        except (TypeError, KeyError) as error:
            raise _foreign(source) from error
        loss, *counts = position.score.best_loss, position.score.best_step, position.score.stale
        counts += [position.step, position.skipped]
        if not all(type(each) is int and each >= 0 for each in counts) or not isinstance(loss, float | int | None):
            raise _foreign(source)
        return position


def _foreign(source: Any) -> TreepackError:
    return TreepackError(f"{source}: its position is not that of a run; take another checkpoint")

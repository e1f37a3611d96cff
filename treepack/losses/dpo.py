"""Direct preference optimisation: the log-sigmoid of the difference of two rollouts (2305.18290, eq. 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treepack.objectives.loss import Loss, Preset, paper

if TYPE_CHECKING:
    from torch import Tensor

    from treepack.objectives.objective import Objective


def _surrogate(differences: Tensor, objective: Objective) -> Tensor:
    from torch.nn.functional import logsigmoid  # there is no method of tensors

    return logsigmoid(objective.beta * differences)


LOSS = Loss(
    name="dpo",
    presets={
        "dpo": Preset(
            {},
            "`-log sigmoid(beta (h_chosen - h_rejected))`, h the sum of `log p - log ref` over a rollout",
            paper("DPO", "2305.18290"),
            "TRL `sigmoid`",
        )
    },
    over="pairs",
    surrogate=_surrogate,
    options=frozenset({"beta"}),
)

"""The policy gradient without a ratio (Williams 1992), and distillation by whole laws alone."""

from treepack.objectives.loss import Loss, Preset, paper
from treepack.objectives.surrogates import Surrogate, weighted

LOSS = Loss(
    name="reinforce",
    presets={
        "reinforce": Preset({"denominator": "token"}, "`-A log p`", "Williams 1992", "verl `gpg`"),
        "distill": Preset(
            {"denominator": "token", "rewarded": False, "distill": 1.0},
            "a divergence of the teacher's law and the model's ([distillation](#distillation))",
            paper("GKD", "2306.13649"),
            "TRL `GKDTrainer`",
        ),
    },
    surrogate=lambda terms, _: Surrogate(weighted(1.0, terms)),
    has_ratio=False,
)

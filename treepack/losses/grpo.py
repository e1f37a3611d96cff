"""Group relative policy optimisation: ppo with other denominators (2402.03300; 2503.14476; 2503.20783)."""

from treepack.objectives.loss import CLIPS, Loss, Preset, paper
from treepack.objectives.surrogates import clipped

_CLIPS = {"clip_low": 0.2, "clip_high": 0.2}

LOSS = Loss(
    name="grpo",
    presets={
        "grpo": Preset({**_CLIPS, "denominator": "trajectory"}, "as `ppo`", paper("GRPO", "2402.03300"), "the same"),
        "dapo": Preset(
            {"clip_low": 0.2, "clip_high": 0.28, "denominator": "token"},
            *("as `ppo`", paper("DAPO", "2503.14476"), "the same"),
        ),
        "bnpo": Preset({**_CLIPS, "denominator": "token"}, "as `ppo`", "TRL", "the same"),
        "dr_grpo": Preset({**_CLIPS, "denominator": "global"}, "as `ppo`", paper("Dr. GRPO", "2503.20783"), "the same"),
    },
    surrogate=lambda terms, objective: clipped(terms.ratio, terms, objective),
    options=CLIPS | {"dual_clip"},
)

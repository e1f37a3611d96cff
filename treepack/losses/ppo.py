"""Proximal policy optimisation: the ratio of each token, clipped (Schulman et al. 2017, 1707.06347, eq. 7)."""

from treepack.objectives.loss import CLIPS, Loss, Preset, paper
from treepack.objectives.surrogates import clipped

_VALUES = {"clip_low": 0.2, "clip_high": 0.2, "denominator": "token"}

LOSS = Loss(
    name="ppo",
    presets={
        "ppo": Preset(
            _VALUES,
            "`-min(r A, clip(r) A)`; with `--dual-clip D` at most `-D A` if A < 0",
            paper("PPO", "1707.06347"),
            "verl `vanilla`",
        ),
        # Distillation by the sampled token, without the advantages of the data.
        "opd": Preset(
            {**_VALUES, "rewarded": False, "teacher_kl": 1.0},
            "as `ppo` with A = `log q - log p` of the sampled token, q the teacher's law "
            "([distillation](#distillation))",
            "[on-policy distillation](https://thinkingmachines.ai/blog/on-policy-distillation)",
        ),
    },
    surrogate=lambda terms, objective: clipped(terms.ratio, terms, objective),
    options=CLIPS | {"dual_clip"},
)

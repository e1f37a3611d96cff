"""Group sequence policy optimisation: the geometric mean of a trajectory's ratios, clipped (2507.18071, eq. 5)."""

from treepack.objectives.loss import CLIPS, Loss, Preset, Whole, paper
from treepack.objectives.surrogates import clipped, whole_ratio

# The ratio of a sequence is a mean over its tokens and varies much less than the ratio of one token.
_CLIPS = {"clip_low": 3e-4, "clip_high": 4e-4}

LOSS = Loss(
    name="gspo",
    presets={
        "gspo": Preset(
            {**_CLIPS, "denominator": "trajectory"},
            "as `ppo`, with `s` for `r`",
            paper("GSPO", "2507.18071"),
            "TRL `gspo_token`",
        ),
        # The sum over a sequence in place of its mean: gspo times the number of its tokens.
        "luspo": Preset({**_CLIPS, "denominator": "global"}, "as `gspo`", paper("LUSPO", "2602.05261"), "the same"),
    },
    whole=Whole(lambda terms, _: terms.current - terms.old),
    surrogate=lambda terms, objective: clipped(whole_ratio(terms.current, terms), terms, objective),
    options=CLIPS | {"dual_clip"},
)

"""Names of losses in verl 0.9.1, TRL 1.16 and slime that are not presets here, with the options to give instead.

A package may define a loss with such a name; then that loss is taken.
"""

from __future__ import annotations

_STATISTICS = (
    "chooses tokens by their covariance within a micro-batch, so its loss would depend on how rows are packed; take "
    "dapo or cispo, or add --entropy"
)
_PAIRS = "is a loss of pairs that is not computed here; take dpo, or train it with TRL on trees (docs/your-trainer.md)"

# The sentence of each name continues "verl's NAME ...".
_OTHERS: dict[str, tuple[str, str]] = {
    "vanilla": ("verl", "is ppo here, with --dual-clip 3"),
    "gpg": ("verl", "is reinforce here"),
    "geo_mean": ("verl", "is gmpo here"),
    "clip_cov": ("verl", _STATISTICS),
    "kl_cov": ("verl", _STATISTICS),
    "bypass_mode": (
        "verl",
        "is ppo with --old-logprobs sampler here, or reinforce with --importance-cap on rows without term_old_logprob",
    ),
    "policy_loss": ("slime", "is ppo, grpo, gspo or cispo here"),
    "sft_loss": ("slime", "is sft here"),
    "value_loss": ("slime", "is value here, or a policy loss with --value-coef"),
    "custom_loss": ("slime", "has no equal on the command line; see treepack.tree_logprobs_like"),
    "reinforce_plus_plus": ("slime", "is ppo after `treepack advantages --estimator reinforce++`"),
    "reinforce_plus_plus_baseline": ("slime", "is ppo after `treepack advantages --estimator grpo --std batch`"),
    "gspo_token": ("TRL", "is gspo here, where each token has its own advantage"),
    "nll": ("TRL", "is sft here"),
    "chunked_nll": ("TRL", "is sft here, which always computes logits in chunks (--loss-chunk)"),
    "dft": ("TRL", "weighs each token of sft by its own probability and is not computed here; take sft"),
    "sigmoid": ("TRL", "is dpo here"),
    **dict.fromkeys(
        "hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop "
        "sigmoid_norm kto apo_zero_unpaired orpo cpo simpo".split(),
        ("TRL", _PAIRS),
    ),
}
OTHER_LOSSES = {name: f"{owner}'s {name} {text}" for name, (owner, text) in _OTHERS.items()}

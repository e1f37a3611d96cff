"""The table of losses in docs/objectives.md: formulas and sources from here, usual values from the presets."""

from __future__ import annotations

from treepack.objectives import objective


def _paper(name: str, number: str) -> str:
    return f"[{name}](https://arxiv.org/abs/{number})"


_CLIPPED = "`-min(r A, clip(r) A)`"
# The loss of a term, its source, and the name elsewhere; see the text below the table for the letters.
FORMULAS: dict[str, tuple[str, str, str]] = {
    "sft": ("`-log p`, with the weights of the rows", "", "TRL `nll`, slime `sft_loss`"),
    "ppo": (f"{_CLIPPED}; with `--dual-clip D` at most `-D A` if A < 0", _paper("PPO", "1707.06347"), "verl `vanilla`"),
    "grpo": ("as `ppo`", _paper("GRPO", "2402.03300"), "the same"),
    "dapo": ("as `ppo`", _paper("DAPO", "2503.14476"), "the same"),
    "bnpo": ("as `ppo`", "TRL", "the same"),
    "dr_grpo": ("as `ppo`", _paper("Dr. GRPO", "2503.20783"), "the same"),
    "gspo": ("as `ppo`, with `s` for `r`", _paper("GSPO", "2507.18071"), "TRL `gspo_token`"),
    "luspo": ("as `gspo`", _paper("LUSPO", "2602.05261"), "the same"),
    "gmpo": (
        "`-A` times the geometric mean of `exp(clip(log r))` over the trajectory, clipped as in `ppo`",
        _paper("GMPO", "2507.20673"),
        "verl `geo_mean`",
    ),
    "cispo": ("`-sg(clip(r)) A log p`", _paper("CISPO", "2506.13585"), "the same"),
    "sapo": (
        "`-4 / tau sigmoid(tau (r - 1)) A`, with the temperature tau by the sign of A",
        _paper("SAPO", "2511.20347"),
        "the same",
    ),
    "vespo": (
        "`-sg(w^k exp(lambda (1 - w))) A log p`, with w the product of r over the trajectory, k and lambda by the sign "
        "of A",
        _paper("VESPO", "2602.10693"),
        "the same",
    ),
    "dppo_tv": (
        "`-sg(min(r, D)) A log p`, 0 if p has moved in the direction of A by more than the clip option",
        _paper("DPPO", "2602.04879"),
        "the same",
    ),
    "dppo_kl": ("the same, moved in KL divergence of the token against the rest", _paper("DPPO", "2602.04879"), ""),
    "dro": ("`-(A log p - beta / 2 (log r)^2)`", _paper("DRO", "2405.19107"), "the same"),
    "reinforce": ("`-A log p`", "Williams 1992", "verl `gpg`"),
    "opd": (
        "as `ppo` with A = `log q - log p` of the sampled token, q the teacher's law ([distillation](#distillation))",
        "[on-policy distillation](https://thinkingmachines.ai/blog/on-policy-distillation)",
        "",
    ),
    "distill": (
        "a divergence of the teacher's law and the model's ([distillation](#distillation))",
        _paper("GKD", "2306.13649"),
        "TRL `GKDTrainer`",
    ),
    "dpo": (
        "`-log sigmoid(beta (h_chosen - h_rejected))`, h the sum of `log p - log ref` over a rollout",
        _paper("DPO", "2305.18290"),
        "TRL `sigmoid`",
    ),
    "value": ("the [value loss](#values-of-a-critic) alone", "", "slime `value_loss`"),
}


def losses() -> str:
    """Return the table in Markdown."""
    lines = ["| `--loss` | loss of a term | clip | denominator | source | elsewhere |", "|---|---|---|---|---|---|"]
    for name in objective.PRESETS:
        chosen, (formula, source, elsewhere) = objective.choose_objective(name), FORMULAS[name]
        has_clip = chosen.is_policy and chosen.loss not in ("sapo", "vespo", "dro", "reinforce")
        clip = f"{chosen.clip_low:g}, {chosen.clip_high:g}" if has_clip else ""
        denominator = "" if name in ("sft", "dpo") else chosen.denominator
        usual = [f"{constant} {value:g}" for constant, value in chosen.constants.items()]
        if chosen.dual_clip is not None:
            usual.append(f"D {chosen.dual_clip:g}")
        if chosen.loss in ("dpo", "dro"):
            usual.append(f"beta {chosen.beta:g}")
        formula = f"{formula} ({', '.join(usual)})" if usual else formula
        lines.append(f"| `{name}` | {formula} | {clip} | {denominator} | {source} | {elsewhere} |")
    return "\n".join(lines) + "\n"

"""Supervised training: weighted cross-entropy of tokens, computed by `model.head.token_loss.weighted_nll`."""

from treepack.objectives.loss import Loss, Preset

LOSS = Loss(
    name="sft",
    presets={"sft": Preset({}, "`-log p`, with the weights of the rows", "", "TRL `nll`, slime `sft_loss`")},
    over="weights",
)

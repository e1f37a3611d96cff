"""The policy losses of `treepack train` on sequences in memory, for trainers that have no loss of their own.

padded log-probabilities of tree_logprobs_like, advantages --sequence_loss--> loss, sums for `step_means`
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from treepack.data.batch import TermTensors
from treepack.errors import TreepackError
from treepack.objectives.factors import denominator_factors
from treepack.objectives.losses import objective_loss
from treepack.objectives.objective import Objective
from treepack.rl.rollout_parts import first_of_each


def sequence_loss(
    logprobs: Tensor,
    entropies: Tensor | None,
    scored: Tensor,
    objective: Objective,
    *,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    sampling_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollouts: Tensor | None = None,
    step_tokens: float | None = None,
    step_sequences: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a policy on sequences, and sums whose totals over a step `losses.step_means` divides.

    Args:
        logprobs: [B, L], with a graph, as `tree_logprobs_like` returns them for padded ids.
        entropies: [B, L], nats; None if they are neither wanted nor part of the loss.
        scored: bool [B, L], the tokens of the loss.
        objective: a policy loss with the denominator token, trajectory, rollout or global; see `choose_objective`.
        advantages: [B], or [B, L] for one of each token.
        old_logprobs: [B, L]; without them every ratio is 1.
        sampling_logprobs: [B, L], of the sampler.
        ref_logprobs: [B, L], of the reference.
        rollouts: [B], equal numbers for the sequences of one rollout, which are all here; for the denominator rollout
            and for `sequence_of` rollout.
        step_tokens: scored tokens of the optimiser step over all micro-batches and ranks; None if this is the step.
        step_sequences: sequences with a scored token of the same step; with `rollouts`, rollouts with one.

    Raises:
        TreepackError: another loss or denominator, or a tensor is missing.
    """
    given = {
        "term_old_logprob": old_logprobs,
        "term_sampling_logprob": sampling_logprobs,
        "term_ref_logprob": ref_logprobs,
        "term_advantage": advantages if advantages.ndim == 2 else advantages[:, None].expand(-1, scored.shape[1]),
    }
    _check_request(objective, given, has_entropies=entropies is not None, has_rollouts=rollouts is not None)
    places = None if rollouts is None else torch.from_numpy(first_of_each(rollouts.cpu().numpy()).astype(np.int32))
    sequence, place = scored.nonzero(as_tuple=True)
    columns = {name: None if each is None else each.detach()[sequence, place] for name, each in given.items()}
    own = logprobs[sequence, place]
    terms = TermTensors(
        tokens=torch.arange(len(own), device=own.device),
        index=torch.arange(len(own), dtype=torch.int32, device=own.device),
        trajectory=sequence.int(),
        weight=torch.ones(len(own), dtype=torch.float64, device=own.device),
        advantage=columns["term_advantage"],
        sampling_logprob=columns["term_sampling_logprob"],
        old_logprob=columns["term_old_logprob"],
        ref_logprob=columns["term_ref_logprob"],
        group=torch.zeros(len(scored), dtype=torch.int32, device=own.device),
        rollout=None if places is None else places.to(own.device),
        position=place.int(),
    )
    counts = scored.sum(1).double().cpu().numpy()
    factors = denominator_factors(
        objective.weighing,
        counts,
        np.ones(len(counts)),
        np.arange(len(counts)) if rollouts is None else rollouts.cpu().numpy(),
        response_length=objective.response_length,
        total_weight=step_tokens,
        total_own=step_sequences,
    )
    spread = torch.zeros_like(own) if entropies is None else entropies[sequence, place]
    return objective_loss(own, spread, terms, torch.from_numpy(factors).to(own.device), objective)


def _check_request(
    objective: Objective, given: Mapping[str, Tensor | None], *, has_entropies: bool, has_rollouts: bool
) -> None:
    """Refuse a loss or denominator that `sequence_loss` lacks, and a tensor that is missing or has no use."""
    denominator = objective.weighing
    is_known = denominator.unit != "group" and denominator.column is None
    if not objective.is_policy or objective.has_values or not is_known:
        raise TreepackError(
            f"sequence_loss: the loss is {objective.name} with the denominator {objective.denominator}; expected a "
            "policy loss without values, and token, trajectory, rollout or global"
        )
    if has_rollouts != objective.is_by_rollout:
        raise TreepackError(
            f"sequence_loss: the denominator is {objective.denominator} and a sequence is a {objective.sequence_of}; "
            "give rollouts if one of them is rollout, else none"
        )
    missing = [name for name in objective.columns if given.get(name) is None]
    if missing or (objective.entropy and not has_entropies):
        name = f"{missing[0].removeprefix('term_')}s" if missing else "entropies"
        raise TreepackError(f"sequence_loss: the loss {objective.name} with these options needs {name}")

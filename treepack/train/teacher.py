"""A teacher beside the model that is trained: it scores each row just before the row's forward pass.

    Batch --add_teacher--> the same Batch, whose terms have the teacher's log-probabilities and laws of all words
    run, Batch --taught--> the same for a run, whose teacher `setup.run_teacher` has loaded

Each token of a row runs through the teacher once, in pieces if the row does. The teacher's states are kept until the
row has run, and its logits exist for a block of tokens at a time (`head.distribution_loss`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from treepack.carry.backward import runner_of
from treepack.carry.offload import CarryMemory
from treepack.data.batch import Batch
from treepack.data.teacher_law import TeacherLaw
from treepack.data.transfers import sent
from treepack.model.head.logit_map import OutputLayer
from treepack.model.head.output_head import find_head, logit_map_of
from treepack.model.loaded import LoadedModel
from treepack.model.term_objective import loss_sets, loss_temperature
from treepack.objectives.objective import Objective
from treepack.objectives.row_numbers import ScoreRequest
from treepack.train.run import TrainingRun


@torch.no_grad()
def add_teacher(
    batch: Batch,
    teacher: LoadedModel,
    objective: Objective,
    *,
    chunk: int,
    limit: int | None = None,
    memory: CarryMemory | None = None,
) -> Batch:
    """Return a row, or joined rows, with the numbers of a teacher that the objective reads; padding as it is.

    Args:
        batch: the row, which no model has prepared yet.
        teacher: a frozen model with the vocabulary of the one that is trained.
        objective: a policy loss.
        chunk: tokens whose logits are in memory at a time.
        limit: tokens of a piece; None for whole rows.
        memory: for tensors that pieces carry.
    """
    terms = batch.terms
    if terms is None or not len(terms.tokens):
        return batch
    temperature = loss_temperature(terms, objective)
    if isinstance(temperature, torch.Tensor):
        temperature = sent(temperature, teacher.device)
    reads = ScoreRequest(logprobs=objective.teacher_kl > 0, entropies=False, states=objective.reads_law)
    runner = runner_of(teacher, batch, limit, chunk=chunk, memory=memory)
    kept = loss_sets(terms, objective)
    kept = kept if kept is None else kept.map(lambda each: sent(each, teacher.device))
    scores = runner.scores(batch, sent(terms.tokens, teacher.device), reads, temperature=temperature, kept=kept)
    of_tokens, law = scores.logprobs, None
    if scores.states is not None:
        head = find_head(teacher.causal)
        bias = None if head.bias is None else head.bias.detach()
        layer = OutputLayer(head.weight.detach(), bias, logit_map_of(teacher.causal))
        law = TeacherLaw(scores.states.to(layer.weight.dtype), logits=layer.logits)
    own = None if of_tokens is None else of_tokens.index_select(0, sent(terms.index, teacher.device))
    return replace(batch, terms=replace(terms, teacher_logprob=own, teacher=law))


def taught(run: TrainingRun, batch: Batch) -> Batch:
    """Return a row of a run with the numbers of its teacher, or as it is if the run has none."""
    if run.teacher is None:
        return batch
    options, chunk = run.options, int(run.options.loss_chunk)
    limit, memory = options.piece_limit, run.carry_memory
    return add_teacher(batch, run.teacher, options.objective, chunk=chunk, limit=limit, memory=memory)

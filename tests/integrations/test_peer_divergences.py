"""Divergences from a teacher equal TRL's generalised Jensen-Shannon loss on the same logits: values and gradients."""

from __future__ import annotations

import pytest
import torch

from treepack.data.teacher_law import TeacherLaw
from treepack.model.head.logit_map import OutputLayer
from treepack.model.head.token_loss import tree_scores

pytestmark = pytest.mark.integrations

LENGTH, WORDS = 12, 17


@pytest.mark.parametrize("stored", [False, True], ids=["states", "top words"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 1])
def test_the_loss_is_that_of_gkd(beta: float, temperature: float, stored: bool) -> None:
    from trl.experimental.gkd import GKDTrainer

    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(LENGTH, WORDS, generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    theirs = student.clone().requires_grad_()
    expected = GKDTrainer.generalized_jsd_loss(
        theirs[None], teacher[None], beta=beta, temperature=temperature, num_items_in_batch=LENGTH
    )
    torch.autograd.backward(expected)
    # The output layer is the identity, so that states are logits; state i predicts token i + 1.
    ours = torch.cat([student, torch.zeros(1, WORDS)]).requires_grad_()
    law = TeacherLaw(teacher, logits=lambda states: states)
    if stored:  # the whole vocabulary as the teacher's likeliest words
        values, ids = (teacher / temperature).log_softmax(-1).topk(WORDS)
        law = TeacherLaw(values, ids)
    targets = torch.arange(1, LENGTH + 1), torch.zeros(LENGTH + 1, dtype=torch.int64), torch.arange(-1, LENGTH)
    layer = OutputLayer(torch.eye(WORDS, dtype=torch.float64))
    found = tree_scores(ours, layer, targets, temperature=temperature, teacher=(law, float(beta)), chunk=5)[2]
    loss = found.mean()
    torch.autograd.backward(loss)
    assert theirs.grad is not None
    assert ours.grad is not None
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ours.grad[:-1], theirs.grad, rtol=1e-9, atol=1e-12)

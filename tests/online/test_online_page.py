"""The program of the page about batches in memory runs, and its gradient is that of every sequence alone."""

from __future__ import annotations

import re
from typing import Any

import torch

from support.oracle_model import gradients, worst_error
from support.oracle_online import MemoryBatch, each_alone
from support.paths import ROOT


def test_the_program_of_the_page_has_the_gradient_of_every_sequence_alone() -> None:
    program, with_our_loss = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "online.md").read_text(), re.M | re.S
    )
    names: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(0)
    exec(compile(program, "docs/online.md", "exec"), names)
    model, found = names["model"], gradients(names["model"])
    exec(compile(with_our_loss, "docs/online.md", "exec"), names)
    assert 0.99 < names["means"]["effective_sample_size"] <= 1
    assert worst_error(gradients(model), found) > 1e-3, "the second loss adds its gradients"
    lengths = names["attention_mask"].sum(1).tolist()
    sequences = [row[:n].tolist() for row, n in zip(names["input_ids"], lengths, strict=True)]
    flags = [row[:n].tolist() for row, n in zip(names["scored"], lengths, strict=True)]
    model.zero_grad()
    model.set_attn_implementation("eager")
    for _ in range(2):
        logprobs, entropies = each_alone(model, MemoryBatch(sequences, flags), 0.7)
        terms = torch.cat(
            [(values - values.detach()).exp() * a for values, a in zip(logprobs, [1.0, -0.5, -0.5], strict=True)]
        )
        scored = torch.cat([torch.tensor(each) for each in flags])
        loss = -terms[scored].mean() - 0.01 * torch.cat(entropies)[scored].mean()
        torch.autograd.backward(loss)
    assert worst_error(found, gradients(model)) < 1e-4

"""The numbers of a training run for people: those of a step in its line, and the summary at the end.

metrics of a step --step_values--> loss 1.2345, lr 1e-05, ...      steps of a run --run_summary--> names and values
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treepack.files.remote.address import AnyPath

from .progress import short

if TYPE_CHECKING:
    from treepack.train.run import TrainingRun
    from treepack.train.step import StepMetrics


# Divergence per token from which on sampler and trainer are two policies; rounding in bfloat16 gives about 0.001.
_LARGE_SAMPLER_KL = 0.01
_MANY_UNUSED = 0.2  # share of terms
_SAMPLER = "KL from the sampler"


def step_values(metrics: StepMetrics) -> dict[str, str]:
    """Return the values of a step for its line."""
    held_out = metrics.evaluation.get("eval_loss")
    means = _named_means(metrics)
    if means.get(_SAMPLER, _LARGE_SAMPLER_KL) < _LARGE_SAMPLER_KL:
        del means[_SAMPLER]
    return {
        "loss": f"{metrics.loss:z.4f}",
        **{name: f"{value:.3g}" for name, value in means.items()},
        **({} if held_out is None else {"held-out loss": f"{held_out:.4f}"}),
        "lr": f"{metrics.lr:.3g}",
        "grad norm": f"{metrics.grad_norm:.3g}",
        "tok/s": short(metrics.tokens_per_second),
        "flat tok/s": short(metrics.tokens_flat_per_second),
    }


def _named_means(metrics: StepMetrics) -> dict[str, float]:
    """Return the means of a step that are watched in reinforcement learning and with preferences, by their names."""
    means = metrics.means
    named: dict[str, float] = {name: means[name] for name in ("reward", "accuracy", "margin") if name in means}
    teacher = {"divergence": "divergence from the teacher", "teacher_kl": "KL to the teacher"}
    named |= {text: means[name] for name, text in teacher.items() if name in means}
    # kl is the divergence from the reference (--kl), old_kl that from the policy that gave the old log-probabilities.
    divergence = {"kl": "KL"} if "kl" in means else {"old_kl": "KL to the old policy"}
    named |= {text: means[name] for name, text in {**divergence, "entropy": "entropy"}.items() if name in means}
    if "clip_fraction_low" in means:
        named |= {"clip share": means["clip_fraction_low"] + means["clip_fraction_high"]}
    return named | ({_SAMPLER: means["sampler_kl"]} if "sampler_kl" in means else {})


def _outcome(steps: list[StepMetrics]) -> dict[str, Any]:
    """Return the lines of the summary about the first and the last step: the loss, or the means that say more."""
    first, last = (_named_means(steps[place]) for place in (0, -1))
    # The loss of a policy is about 0 in every step, whatever it learns.
    losses = {} if "zero_advantage" in steps[0].means else {"first loss": steps[0].loss, "last loss": steps[-1].loss}
    names = [name for name in first if name in last]
    lines = losses | {f"{name}, first and last": f"{first[name]:.4g}, {last[name]:.4g}" for name in names}
    return lines | _sampler_lines(steps[-1].means) | _unused_terms(steps)


def _sampler_lines(means: dict[str, float]) -> dict[str, Any]:
    """Return the line with the KL from the sampler by position, if it is large."""
    # {"sampler_kl": 0.2, "sampler_kl_to_256": 0.1, "sampler_kl_to_1k": 0.3} -> "to 256: 0.1, to 1k: 0.3"
    parts = {name[11:].replace("_", " "): value for name, value in means.items() if name.startswith("sampler_kl_")}
    if not parts or means["sampler_kl"] < _LARGE_SAMPLER_KL:
        return {}
    shown = ", ".join(f"{name}: {value:.3g}" for name, value in parts.items())
    return {"KL from the sampler by position, last": shown}


def _unused_terms(steps: list[StepMetrics]) -> dict[str, Any]:
    """Return the line about terms without an advantage, if they are many."""
    share = sum(each.means.get("zero_advantage", 0.0) for each in steps) / len(steps)
    if share < _MANY_UNUSED:
        return {}
    return {"terms with advantage 0": f"{share:.1%}; `treepack advantages --reject-equal` leaves out their groups"}


def run_summary(run: TrainingRun, out: AnyPath, steps: list[StepMetrics]) -> dict[str, Any]:
    """Return the lines of the summary."""
    from treepack.train.saving.run_record import is_finished

    record: dict[str, Any] = {"steps": len(steps), "attention": run.loaded.attention}
    if run.ranks.grouped:
        record["ranks"] = run.ranks.size
    if steps:  # none if the run was already complete
        seconds = sum(metrics.seconds for metrics in steps)
        tokens, flat = (sum(getattr(metrics, name) for metrics in steps) for name in ("tokens", "tokens_flat"))
        record |= {
            **_outcome(steps),
            "tokens computed": tokens,
            "tokens if each trajectory is computed alone": flat,
            "tokens per second": tokens / seconds,
            "flat-equivalent tokens per second": flat / seconds,
            "time spent waiting for rows": f"{sum(metrics.wait_seconds for metrics in steps) / seconds:.1%}",
        }
        record |= _passes(run, steps) | _peaks(run)
        evaluations = [(each.evaluation["eval_loss"], each.step) for each in steps if each.evaluation]
        if evaluations:
            loss, step = min(evaluations)
            record |= {"last held-out loss": evaluations[-1][0], "lowest held-out loss": f"{loss:.4f} at step {step}"}
        skipped = sum(bool(metrics.skipped_rows) for metrics in steps)
        record |= {"skipped steps": skipped} if skipped else {}
    # Only a signal ends a run early without an error, and only after a step, so `steps` is not empty.
    if not is_finished(out):
        record["stopped"] = f"after step {steps[-1].step} of {len(run.schedule)}; continue with --resume"
    return record


def _passes(run: TrainingRun, steps: list[StepMetrics]) -> dict[str, Any]:
    """Return the lines about rows in pieces; none for a run without --carry."""
    if run.options.carry is None:
        return {}
    forward, backward = (sum(each.passes[name] for each in steps) for name in ("tokens_forward", "tokens_backward"))
    return {"tokens of a piece": run.options.carry, "tokens forward": forward, "tokens backward": backward}


def _peaks(run: TrainingRun) -> dict[str, int]:
    """Return the lines about memory on the GPU of this rank; none for a run that keeps all its tensors there."""
    import torch

    from treepack.model.layers import adapted_layers

    options, adapted = run.options, adapted_layers(run.loaded.causal)
    if run.loaded.device.type != "cuda" or (options.carry is None and not options.offload_checkpoints):
        return {}
    pinned = 0 if run.carry_memory is None else run.carry_memory.num_bytes
    if adapted is not None and adapted.offload is not None:
        pinned += adapted.offload.pages.num_bytes
    peak = torch.cuda.max_memory_allocated(run.loaded.device)
    return {"peak of GPU memory in bytes": peak, "pinned host memory in bytes": pinned}

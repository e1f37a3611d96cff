"""The sections in which the help of a command shows its options: one table for all commands."""

from __future__ import annotations

import click

_READING = {
    "Read rollouts": "format columns tokenizer chat-template tools expand per-path share reward-key normalize-ids "
    "train-all workers",
    "Records that are damaged, cut or odd": "control-tokens truncated failed strict skip-bad max-record-size",
}
_ROWS = {
    "Rows": "capacity pairs-budget terms-budget balance model too-long",
    "Weights of the loss": "semantics normalize leaf-weights fallback-leaves",
}
_SEARCH = {"Search for the rows": "method effort time-limit"}
_COMMAND = {"Command": "config quiet help"}

_OUT = "out overwrite"
# Names of options without dashes, by heading, by command; an option that is in none comes last.
SECTIONS: dict[str, dict[str, str]] = {
    "stats": {
        "Output": "json verbose check trie effective-ratio predictions segment",
        "Forecast": "model device capacity balance",
        **_SEARCH,
        **_READING,
        "Machine": "memory",
        **_COMMAND,
    },
    "report": {
        "Output": "out png watch overwrite",
        "Page": "trie no-text text-limit",
        "Forecast": "model capacity",
        **_SEARCH,
        **_READING,
        **_COMMAND,
    },
    "show": {"Output": "trajectory group row text full json", **_READING, **_COMMAND},
    "prepare": {
        "Output": f"{_OUT} advantages",
        **_READING,
        **_ROWS,
        **_SEARCH,
        "Machine": "memory",
        **_COMMAND,
    },
    "build-trie": {
        "Output": _OUT,
        **_READING,
        "Experts": "keep-routes route-conflicts",
        "Machine": "memory ray",
        **_COMMAND,
    },
    "advantages": {
        "Estimator and output": f"estimator {_OUT}",
        "Rewards": "kl-in-reward kl-estimator overlong",
        "Groups": "by std epsilon reject-equal rejected",
        "Estimators that use the tree": "segment min-depth size-weighted reject-subgroups without-root per-segment "
        "leaf-scaled edges leaf-weights fallback-leaves",
        "Values of a critic (gae)": "values gamma lambda whiten truncated",
        **_COMMAND,
    },
    "pack": {
        "Output": f"{_OUT} save-plan verbose",
        **_ROWS,
        **_SEARCH,
        "Plan and machine": "plan partitions workers memory ray",
        **_COMMAND,
    },
    "train": {
        "Data, model and output": "model init-from out overwrite resume dry-run mix eval config from-run quiet",
        "Loss and optimiser": "loss epochs steps rows-per-step optimizer lr schedule min-lr-ratio warmup-steps "
        "weight-decay betas clip seed",
        "LoRA and quantised weights": "lora-rank lora-alpha lora-targets lora-dropout quantize merge dequantize",
        "Held-out rows and checkpoints": "eval-every patience checkpoint-every keep save-dtype max-skipped",
        "Metrics": "log-every report-to project run-name",
        "Any loss": "denominator response-length entropy temperature router-aux routes",
        "Ratios and clipping (policy losses)": "clip-low clip-high dual-clip old-logprobs",
        "Sampler and trainer disagree (policy losses)": "importance-cap importance-floor importance-mask "
        "importance-level sequence-mask sequence-of",
        "KL from a reference (policy losses)": "kl kl-estimator",
        "Constants and values of single losses": "beta loss-constant value-coef value-clip",
        "Distillation (policy losses)": "distill distill-beta teacher-kl teacher-baseline teacher",
        "Choices of the run": "dtype compile attention checkpoint-layers offload-checkpoints "
        "offload-optimizer carry pass-tokens loss-chunk sequence-ranks expert-ranks whole-weights blocks",
        "Devices and storage": "device gather-dtype cache cache-size",
        "Verification": "verify verify-rows help",
    },
    "logprobs": {
        "Model and output": f"model quantize {_OUT}",
        "Columns": "column top-k groups entropies temperature ignore-temperature",
        "Speed and memory": "carry pass-tokens loss-chunk dtype attention sequence-ranks",
        "Device and experts": "device seed routes",
        **_COMMAND,
    },
    "critic": {
        "Model and output": f"model {_OUT}",
        "Speed and memory": "capacity carry pass-tokens dtype attention",
        "Device and experts": "device routes",
        **_COMMAND,
    },
    "rollout": {
        "Engine": "engine model api-key-env unseeded dtype device keep-routes route-layers",
        "Output": "out resume json",
        "Number and length of rollouts": "sampler width max-tokens queries",
        "Trees (treepo)": "depth segment first-forks branches branching branching-temperature fallback max-repeats",
        "Distribution": "temperature top-p top-k seed",
        "Prompts": "prompts trie tokenizer chat-template tools step",
        "Environment, reward and end": "environment reward answer stop-token-id",
        "Requests": "concurrency timeout attempts",
        **_COMMAND,
    },
    "nearest": {
        "Output": f"k {_OUT}",
        "Prior of the pass rate": "mu tau sigma",
        "Sampling": "sweeps burn-in seed workers",
        **_COMMAND,
    },
    "allocation": {
        "Budget": "budget expand candidates selected",
        "Simulated rollouts": "steps seed max-turns success spread persistence segment",
        "Predictor": "root-noise prefix-noise",
        "Command": "json config quiet help",
    },
    "fit": {
        "Model and output": f"model {_OUT}",
        "Data": "prefix-share segment capacity",
        "Optimiser": "freeze epochs rows-per-step lr min-lr-ratio warmup-steps weight-decay clip seed",
        "Speed and device": "checkpoint-layers dtype attention device",
        **_COMMAND,
    },
}


class SectionedCommand(click.Command):
    """A command whose help shows its options in the sections of `SECTIONS`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in their sections."""
        # {"loss": ("--loss [sft|...]", "Loss to minimise."), ...}, in the order of the command
        records = {
            parameter.opts[-1].lstrip("-"): record
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)) is not None
        }
        for heading, names in SECTIONS.get(self.name or "", {}).items():
            with formatter.section(heading):
                formatter.write_dl([records.pop(name) for name in names.split()])
        if records:
            with formatter.section("Other options" if self.name in SECTIONS else "Options"):
                formatter.write_dl([*records.values()])

"""Names of other trainers, and names that are gone since 0.2.0, with the names here.

A command that gets such an option, or a config file with such a key, ends with the name here. Both tables are also
generated parts of docs/coming-from.md and CHANGELOG.md.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache

import click

_CAPACITY = "pack takes 16k, 64k or the next power of two; for another capacity, stats TRIE compares them"
_MEMORY = "stats TRIE --device forecasts memory"

GONE = {
    "build-trie --partitions": "build-trie --ray takes shares of whole files, so leave it out, and give many files",
    "pack --device": f"{_CAPACITY}, and {_MEMORY}",
    "prepare --device": f"{_CAPACITY}, and {_MEMORY}",
    "stats --carry": "stats takes the largest pieces that fit; train chooses the size itself, or takes --carry N",
    "tree.png of report --png": "the page of report --out draws the trees, and --png the charts alone",
    "treepack.cluster.map_scheduler, exchange, reading": "build-trie TRIE TRIE joins tries, and --ray builds them",
    "CountPlanner of treepack.integrations.trl": "TreePlanner in place of TokenBudgetBatcher, with a token budget",
    "Tokens.advantages, and other plurals": "the name of the column, such as Tokens.advantage",
}
"""Options and names in Python that are gone since 0.2.0, and what to use instead."""

# The name here, and the names in TRL and transformers, in Axolotl and in verl, separated by spaces. A first field
# with a colon is a sentence. Checked with trl 1.16, transformers 5.24 and verl 0.9.1.
_OTHERS = """
train --model | model_name_or_path | base_model | model.path
train --out | output_dir | output_dir | trainer.default_local_dir
train --loss | loss_type | rl | policy_loss.loss_mode
train --lr | learning_rate | learning_rate | optim.lr
train --epochs | num_train_epochs | num_epochs | trainer.total_epochs
train --steps | max_steps | max_steps | trainer.total_training_steps
train --rows-per-step | per_device_train_batch_size gradient_accumulation_steps | micro_batch_size \
gradient_accumulation_steps | data.train_batch_size actor.ppo_mini_batch_size
train --pass-tokens | | | actor.ppo_micro_batch_size_per_gpu actor.ppo_max_token_len_per_gpu
train --warmup-steps | warmup_steps | warmup_steps warmup_ratio | optim.lr_warmup_steps
train --optimizer | optim | | optim.optimizer
train --schedule | lr_scheduler_type | lr_scheduler | optim.lr_scheduler_type
train --min-lr-ratio | lr_scheduler_kwargs | cosine_min_lr_ratio | optim.min_lr_ratio
train --weight-decay | weight_decay | weight_decay | optim.weight_decay
train --betas | adam_beta1 adam_beta2 | adam_beta1 adam_beta2 | optim.betas
train --clip | max_grad_norm | max_grad_norm | actor.grad_clip
train --seed | seed | seed | fsdp_config.seed
train --lora-rank | lora_r | lora_r | model.lora_rank
train --lora-alpha | lora_alpha | lora_alpha | model.lora_alpha
train --lora-targets | lora_target_modules | lora_target_modules | model.target_modules
train --quantize | load_in_4bit | load_in_4bit |
train --eval | | test_datasets val_set_size | data.val_files
train --eval-every | eval_steps | eval_steps | trainer.test_freq
train --patience | | early_stopping_patience |
train --checkpoint-every | save_steps | save_steps | trainer.save_freq
train --keep | save_total_limit | save_total_limit | trainer.max_actor_ckpt_to_keep
train --resume | resume_from_checkpoint | resume_from_checkpoint | trainer.resume_mode
train --report-to | report_to | | trainer.logger
train --project | project | wandb_project | trainer.project_name
train --run-name | run_name | wandb_name | trainer.experiment_name
train --log-every | logging_steps | logging_steps |
train --clip-low | epsilon | | actor.clip_ratio_low
train --clip-high | epsilon_high | | actor.clip_ratio_high
train --dual-clip | delta | | actor.clip_ratio_c
train --kl | beta | | actor.kl_loss_coef
train --kl-estimator | | | actor.kl_loss_type
train --entropy | entropy_coef | | actor.entropy_coeff
train --denominator | | | actor.loss_agg_mode
train --importance-cap | vllm_importance_sampling_clip_max | | rollout_correction.rollout_is_threshold
train --importance-floor | vllm_importance_sampling_clip_min | |
train --importance-level | vllm_importance_sampling_mode importance_sampling_level | | rollout_correction.rollout_is
train --sequence-mask | off_policy_mask_threshold | |
train --router-aux | router_aux_loss_coef | |
train --dtype | bf16 fp16 | bf16 fp16 | fsdp_config.dtype
train --compile | torch_compile | torch_compile | fsdp_config.use_torch_compile
train --attention | attn_implementation | flash_attention | override_config.attn_implementation
train --checkpoint-layers | gradient_checkpointing | gradient_checkpointing | model.enable_gradient_checkpointing
train --offload-checkpoints | activation_offloading | activation_offloading | model.enable_activation_offload
train --offload-optimizer | | | fsdp_config.optimizer_offload
train --sequence-ranks | | context_parallel_size | actor.ulysses_sequence_parallel_size
: weights are sharded under torchrun, without an option | fsdp fsdp_config deepspeed | fsdp_config deepspeed | \
actor.strategy
pack --capacity | max_length | sequence_len |
: each row is packed, without an option | packing padding_free | sample_packing | model.use_remove_padding
build-trie --train-all | assistant_only_loss completion_only_loss | train_on_inputs |
build-trie --chat-template | chat_template_path | chat_template | model.custom_chat_template
advantages --estimator | | | algorithm.adv_estimator
advantages --std | scale_rewards | | algorithm.norm_adv_by_std_in_grpo
advantages --gamma | | | algorithm.gamma
advantages --lambda | | | algorithm.lam
rollout --width | num_generations | num_generations | rollout.n
rollout --max-tokens | max_completion_length | max_completion_length | rollout.response_length
rollout --engine | vllm_server_base_url | |
"""
# Names that are typed, although no trainer of the table has them.
_TYPED = {"batch_size": "train --rows-per-step", "max_seq_length": "pack --capacity", "output": "train --out"}


def other_names() -> list[tuple[str, ...]]:
    """Return the lines of the table: the option here or a sentence, and the names of each trainer."""
    lines = _OTHERS.strip().replace("\\\n", "").splitlines()
    return [tuple(re.split(r" *\| *", line.removeprefix(": "))) for line in lines]


@cache
def _ours() -> dict[str, str]:
    """Return the option here, or a sentence, by the names of other trainers: {"learning_rate": "train --lr", ...}."""
    found = dict(_TYPED)
    for ours, *names in other_names():
        for name in " ".join(names).split():
            found.setdefault(name.rpartition(".")[2], ours)
    return found


def replacement(command: str, option: str, known: Collection[str]) -> str | None:
    """Return what to use instead of an option that `command` does not have among its `known` ones, or None.

    "train", "--learning-rate", ["--lr", "--out"] -> "is --lr here"
    """
    if (remedy := GONE.get(f"{command} {option}")) is not None:
        return f"is gone; {remedy}"
    ours = _ours().get(option.lstrip("-").replace("-", "_"))
    if ours is None:
        return None
    owner, _, name = ours.partition(" --")
    if not name:
        return f"is not needed: {ours}"
    return f"is --{name} here" if f"--{name}" in known else f"is --{name} of treepack {owner}"


def refuse_known(error: click.NoSuchOption, command: str | None) -> None:
    """Raise the sentence of an option that `command` does not have, if a name to use instead is known.

    Raises:
        UsageError: naming what to use instead.
    """
    known = [] if error.ctx is None else [name for each in error.ctx.command.params for name in each.opts]
    if (answer := replacement(command or "", error.option_name, known)) is not None:
        raise click.UsageError(f"{error.option_name} {answer}", error.ctx) from error

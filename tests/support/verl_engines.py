"""The program of each process of the tests in verl: its own engine and treepack's train on the same rollouts.

    run_engines(FOLDER)     both engines on every case, over two processes
    main(rank, FOLDER)      one of these processes; rank 0 writes FOLDER/records.pt

verl brings no CPU platform of its own, so one is registered through its registry of platforms. TRL is hidden, because
verl's engines fail where a TRL without value heads is installed, as 1.16 is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tensordict import TensorDict
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import tensordict_utils
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from support.paths import ROOT, TESTS
from treepack.errors import TreepackError

RANKS = 2
PROMPT, ANSWER = 40, 12  # widths of verl's padded prompts and answers
STEPS = 3


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """What verl's engines ask of a platform, for torch.cpu."""

    device_name, vendor_name, device_module = "cpu", "cpu", torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def communication_backend_name(self) -> str:
        return "gloo"


CpuPlatform.__abstractmethods__ = frozenset()  # of Ray, vLLM and profilers, which the tests do not start
torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]


class _CpuFSDP(FullyShardedDataParallel):
    """FSDP without the broadcast of weights at its start, which torch has for GPUs only; all ranks read the file."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"sync_module_states": False})


@dataclass(frozen=True)
class Case:
    """A run of both engines; `actor` and `batch` are options of verl."""

    strategy: str = "fsdp2"
    actor: dict[str, Any] = field(default_factory=dict)
    batch: dict[str, Any] = field(default_factory=dict)
    siblings: tuple[int, int] = (8, 8)  # of the two prompts of each rank
    sequence_ranks: int = 1  # of treepack's engine, each of which gets the rollouts of all ranks of its group
    lora_rank: int = 0
    steps: int = 1


# verl computes these weights and masks inside its loss, from the log-probabilities of the engine.
CORRECTION = {
    **{"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": 2.0},
    **{"rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.4"},
}

CASES: dict[str, Case] = {
    **{
        mode: Case(actor={"loss_agg_mode": mode})
        for mode in ("token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
    },
    "token-mean": Case(steps=STEPS),
    "FSDP": Case("fsdp", steps=STEPS),
    "LoRA": Case(lora_rank=4, steps=STEPS),
    "ratio of sequences": Case(actor={"policy_loss": {"loss_mode": "gspo"}}),
    "cispo": Case(actor={"policy_loss": {"loss_mode": "cispo"}}),
    "rollout correction": Case(
        actor={"policy_loss": {"loss_mode": "bypass_mode", "rollout_correction": CORRECTION}},
    ),
    "one temperature": Case(batch={"temperature": 0.7}),
    "fixed micro-batches": Case(batch={"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4}),
    "more micro-batches on one rank": Case(batch={"max_token_len_per_gpu": 90}, siblings=(15, 1)),
    "sequence parallel": Case(batch={"max_token_len_per_gpu": 60}, sequence_ranks=2, steps=STEPS),
    "sequence parallel and FSDP": Case("fsdp", sequence_ranks=2, steps=2),
    "sequence parallel and LoRA": Case(sequence_ranks=2, lora_rank=4, steps=2),
}


def make_rollouts(rank: int, siblings: tuple[int, int], options: dict[str, Any], ranks: int = 1) -> TensorDict:
    """Return the rollouts of a rank as verl's trainer gives them to an engine, in an order that parts siblings.

    A rank of a sequence group of several `ranks` gets those of all ranks of the group.
    """
    first = rank // ranks * ranks
    columns = [_rollout_columns(each, siblings) for each in range(first, first + ranks)]
    joined = {name: torch.cat([each[name] for each in columns]) for name in columns[0]}
    data = left_right_2_no_padding(TensorDict(joined, batch_size=ranks * sum(siblings)))
    given = {
        "calculate_entropy": True,
        "global_batch_size": RANKS * sum(siblings),
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 160,
    }
    if "temperature" in options:
        del data["temperature"]
    tensordict_utils.assign_non_tensor(data, **(given | options))
    return data


def _rollout_columns(rank: int, siblings: tuple[int, int]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    ids = torch.zeros(sum(siblings), PROMPT + ANSWER, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    turns = torch.zeros(len(ids), ANSWER, dtype=torch.int64)  # 0 at tokens of tools
    begin = 0
    for prompt, count in enumerate(siblings):
        width = PROMPT - 3 * prompt - rank
        tokens = torch.randint(3, 1000, (width,), generator=draw)
        first = torch.randint(3, 1000, (4,), generator=draw)
        for i in range(begin, begin + count):
            length = int(torch.randint(2, ANSWER + 1, (), generator=draw))
            answer = torch.randint(3, 1000, (length,), generator=draw)
            if i % 2:
                answer[: min(4, length)] = first[:length]  # half of the siblings share their first tokens
            ids[i, PROMPT - width : PROMPT + length] = torch.cat([tokens, answer])
            mask[i, PROMPT - width : PROMPT + length] = 1
            turns[i, :length] = 1
            turns[i, 5:7] = 0  # what a tool returned
        begin += count
    order = torch.randperm(len(ids), generator=draw)
    ids, mask, turns = ids[order], mask[order], turns[order]
    answers = mask[:, PROMPT:]
    noise = [torch.randn(len(ids), ANSWER, generator=draw) * answers for _ in range(3)]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "response_mask": turns * answers,
        "old_log_probs": -7 + 0.2 * noise[0],
        "ref_log_prob": -7 + 0.2 * noise[1],
        "advantages": noise[2],
        "temperature": 0.7 + 0.3 * (torch.arange(len(ids)) % 2),  # of each sample
    }


def engine_configs(
    path: Path, *, model: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, lr: float = 0.0
) -> dict[str, Any]:
    """Return the arguments of an engine in float32 that does not change its weights, with changed options of verl."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import EngineRouterReplayConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    whole = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    options: dict[str, Any] = {"mixed_precision": whole, "use_torch_compile": False, "use_orig_params": True} | (
        engine or {}
    )
    if "router_replay" in options:
        options["router_replay"] = EngineRouterReplayConfig(**options["router_replay"])
    return {
        "model_config": HFModelConfig(path=str(path), load_tokenizer=False, **model or {}),
        "engine_config": FSDPEngineConfig(**options),
        "optimizer_config": FSDPOptimizerConfig(lr=lr, clip_grad=1e9, total_training_steps=10),
        "checkpoint_config": CheckpointConfig(),
    }


def tree_engine_class(kind: str, strategy: str = "treepack") -> Any:
    """Return the engine that verl chooses for a strategy of treepack."""
    from verl.workers.engine import EngineRegistry

    import treepack.integrations.verl  # noqa: F401  what `external_lib` imports

    return EngineRegistry.get_engine_cls(kind, strategy)


def make_engine(model: Path, case: Case, *, on_trees: bool) -> Any:
    """Return verl's engine of a case, or treepack's, with the same weights."""
    from verl.workers.engine.fsdp import transformer_impl

    torch.manual_seed(0)  # of the adapters
    options: dict[str, Any] = {"lora_rank": case.lora_rank}
    if on_trees:
        options["external_lib"] = "treepack.integrations.verl"
    else:
        options["override_config"] = {"attn_implementation": "sdpa"}
    lr = 1e-3 if case.steps > 1 else 0.0
    sequence = {"ulysses_sequence_parallel_size": case.sequence_ranks if on_trees else 1}
    configs = engine_configs(model, model=options, engine={"strategy": case.strategy, **sequence}, lr=lr)
    if on_trees:
        strategy = {"fsdp2": "treepack", "fsdp": "treepack_fsdp"}[case.strategy]
        object.__setattr__(configs["engine_config"], "strategy", strategy)  # as verl's actor config does
        engine = tree_engine_class("language_model", strategy)(**configs)
    else:
        engine = transformer_impl.FSDPEngineWithLMHead(**configs)
    with patch.object(transformer_impl, "FSDP", _CpuFSDP):
        engine.initialize()
    for name, parameter in engine.module.named_parameters():
        if "lora_B" in name:  # 0 at first, so that the adapter would have no effect
            local = parameter.detach().to_local()
            local.copy_(0.05 * torch.sin(torch.arange(local.numel())).view_as(local))
    return engine


def full_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of every parameter over all ranks, by its name in the model."""
    if isinstance(module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(module, with_grads=True):
            pairs = [(name, parameter.grad) for name, parameter in module.named_parameters()]
            whole = {name: gradient.clone() for name, gradient in pairs if gradient is not None}
    else:
        sharded = [(name, parameter.grad) for name, parameter in module.named_parameters()]
        whole = {name: gradient.full_tensor() for name, gradient in sharded if gradient is not None}  # type: ignore[attr-defined]
    return {
        name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", ""): each
        for name, each in whole.items()
    }


def record(engine: Any, case: Case, rank: int) -> dict[str, Any]:
    """Return what verl's trainer sees of an engine: log-probabilities, entropies, losses, metrics, gradients."""
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    actor = dict(case.actor)
    if "policy_loss" in actor:
        from verl.workers.config import PolicyLossConfig

        actor["policy_loss"] = PolicyLossConfig(**actor["policy_loss"])
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=8,
        use_dynamic_bsz=True,
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        use_torch_compile=False,
        **actor,
    )
    tokens: list[int] = []
    embedding = next(module for module in engine.module.modules() if isinstance(module, nn.Embedding))
    hook = embedding.register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0].numel()))
    data = make_rollouts(rank, case.siblings, case.batch, engine.ulysses_sequence_parallel_size)
    with engine.eval_mode():
        output = engine.infer_batch(data)["model_output"]
    hook.remove()
    result: dict[str, Any] = {
        name: no_padding_2_padding(output[name], data) * data["response_mask"] for name in ("log_probs", "entropy")
    }
    result["tokens"], result["steps"] = sum(tokens), []
    for _ in range(case.steps):
        data = make_rollouts(rank, case.siblings, case.batch, engine.ulysses_sequence_parallel_size)
        with engine.train_mode(zero_grad_on_exit=False):
            trained = engine.train_batch(data, partial(ppo_loss, config=config))
            step = {"loss": sum(trained["loss"]), "micro_batches": len(trained["loss"])}
            step["gradients"] = full_gradients(engine.module)
        result["steps"].append(step)
    return result


def join_ranks(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of one rank with the rollouts of several, whose loss is the mean of theirs."""
    joined: dict[str, Any] = {name: torch.cat([each[name] for each in records]) for name in ("log_probs", "entropy")}
    joined["tokens"] = sum(each["tokens"] for each in records)
    losses = [[step["loss"] for step in each["steps"]] for each in records]
    means = [sum(step) / len(records) for step in zip(*losses, strict=True)]
    joined["steps"] = [step | {"loss": mean} for step, mean in zip(records[0]["steps"], means, strict=True)]
    return joined


def refusals(engine: Any, rank: int) -> dict[str, str]:
    """Return the error of each option of a batch that needs more than log-probabilities and entropies."""
    messages = {}
    options: dict[str, Any] = dict.fromkeys(
        ("distillation_use_topk", "distillation_only", "calculate_sum_pi_squared", "use_fused_kernels"), True
    )
    for name, value in (options | {"force_group_size": 2}).items():
        try:
            with engine.eval_mode():
                engine.infer_batch(make_rollouts(rank, (2, 2), {name: value}))
        except TreepackError as error:
            messages[name] = str(error)
    return messages


def replay(folder: Path, rank: int, sequence_ranks: int) -> dict[str, Any]:
    """Return the log-probabilities of a mixture with recorded experts: of the engine, of each sequence alone, and free.

    Ranks of one sequence group have equal sequences. Equal prefixes have equal experts, except that of the first
    sequence, which has its own.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from verl.workers.config import EngineRouterReplayConfig

    from treepack.attention import register
    from treepack.online import tree_logprobs_like

    path, rank = folder / "mixture", rank // sequence_ranks * sequence_ranks
    case = Case(batch={"temperature": 1.0}, sequence_ranks=sequence_ranks)
    engine = make_engine(path, case, on_trees=True)
    data = make_rollouts(rank, (3, 3), case.batch)
    sequences = list(data["input_ids"].unbind())
    routes = [torch.stack([ids % 4, (ids + 1 + (i == 0)) % 4], -1)[:, None] for i, ids in enumerate(sequences)]
    offsets = data["input_ids"].offsets()
    recorded = torch.cat(routes).expand(-1, 2, -1).to(torch.int16).contiguous()
    recorded[offsets[1:] - 1] = 0  # no sampler computes a last token
    found: dict[str, Any] = {}
    for mode in ("disabled", "R3"):
        config = EngineRouterReplayConfig(mode=mode)
        object.__setattr__(engine.engine_config, "router_replay", config)
        if mode == "R3":
            try:
                with engine.eval_mode():
                    engine.infer_batch(make_rollouts(rank, (3, 3), case.batch))
            except TreepackError as error:
                found["refusal"] = str(error)
        batch = make_rollouts(rank, (3, 3), case.batch)
        batch["routed_experts"] = torch.nested.nested_tensor_from_jagged(recorded, offsets)
        with engine.eval_mode():
            found[mode] = engine.infer_batch(batch)["model_output"]["log_probs"].values()
    register()
    model = AutoModelForCausalLM.from_pretrained(
        path, config=AutoConfig.from_pretrained(path), attn_implementation="treepack_reference", dtype=torch.float32
    )
    with torch.no_grad():
        rows = torch.tensor_split(recorded, offsets[1:-1].tolist())
        alone = [tree_logprobs_like(model, [ids], routes=[own])[0][0] for ids, own in zip(sequences, rows, strict=True)]
    found["alone"] = torch.cat(alone).roll(-1)
    return found


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=RANKS)
    # Cases of one step share two engines, which never change their weights.
    fixed = [make_engine(folder / "model", Case(), on_trees=tree) for tree in (False, True)]
    errors = refusals(fixed[1], rank)
    records = {}
    for name, case in CASES.items():
        pair = fixed
        if case.steps > 1:
            pair = [make_engine(folder / "model", case, on_trees=tree) for tree in (False, True)]
        gathered: list[Any] = [None] * RANKS
        distributed.all_gather_object(gathered, [record(engine, case, rank) for engine in pair])
        flat, size = [each for each, _ in gathered], case.sequence_ranks
        firsts = [each // size * size for each in range(RANKS)]
        records[name] = [
            (join_ranks(flat[first : first + size]), tree) for first, (_, tree) in zip(firsts, gathered, strict=True)
        ]
        if rank == 0:
            torch.save({"cases": records, "refusals": errors}, folder / "records.pt")
    replays: list[Any] = [None] * RANKS
    distributed.all_gather_object(replays, [replay(folder, rank, size) for size in (1, 2)])
    if rank == 0:
        torch.save({"cases": records, "refusals": errors, "replay": list(chain(*replays))}, folder / "records.pt")
    distributed.destroy_process_group()


def run_engines(folder: Path) -> Any:
    """Return `cases`, of each case and rank the records of verl's engine and of treepack's, `refusals` and `replay`."""
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(ROOT / "sample_data" / "tiny-qwen3.json")
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.5}
    mixture = Qwen3MoeConfig(vocab_size=config.vocab_size, **sizes, **experts)
    AutoModelForCausalLM.from_config(mixture).save_pretrained(folder / "mixture")
    program = (
        "import sys; sys.modules['trl'] = None; from pathlib import Path; from support.verl_engines import main; "
        "main(int(sys.argv[1]), Path(sys.argv[2]))"
    )
    environment = os.environ | {"VERL_PLATFORM": "cpu", "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(RANKS):
        with (folder / f"rank{rank}.log").open("w") as log:
            command = [sys.executable, "-c", program, str(rank), str(folder)]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(1200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * RANKS, "\n".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(RANKS))
    return torch.load(folder / "records.pt", weights_only=False)

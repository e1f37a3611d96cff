"""An engine for verl 0.9 that computes every shared prefix once; importing this module registers it.

    actor_rollout_ref.model.external_lib=treepack.integrations.verl      imports this module in every worker
    actor_rollout_ref.actor.strategy=treepack                            verl's FSDP2 engine, on trees
    actor_rollout_ref.actor.strategy=treepack_fsdp                       verl's FSDP engine, on trees

    verl                                                   here
    mini-batch                     --forward_backward-->   micro-batches of siblings, equally many on every rank
    micro-batch, jagged ids        --forward_step----->    one row, its log-probabilities and entropies, jagged
    losses, KL, rollout correction, metrics, optimiser, checkpoints, weights for the rollouts: verl's

With `router_replay.mode=R3` in the actor's fsdp_config, tokens of a mixture go to the experts that the rollout used.
verl puts these into the column routed_experts (rollout.enable_rollout_routing_replay=True); see `model.experts.replay`.

With `ulysses_sequence_parallel_size` of R, the ranks of verl's sequence group compute each row together, by
`sequence.share`, and a row may have R times as many tokens. verl's own exchange of tokens and heads is not used.

The log-probability of token j is at place j - 1, as in verl. The last place of a sequence is 0; verl has a value there
that no loss uses.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, distributed
from verl.utils import tensordict_utils
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import detach_tree, postprocess_batch_func

from treepack.attention import register
from treepack.errors import TreepackError
from treepack.integrations.tree_model import check_model, find_causal, use_tree_attention
from treepack.integrations.versions import check_program
from treepack.online import OnlineOptions, batch_statistics, plan_batch
from treepack.pack.micro_batches import micro_batches
from treepack.sequence.share import check_heads, share_rows
from treepack.trajectory import as_routes
from treepack.trie.route_symbols import route_symbols

# Options of a batch that need more than log-probabilities and entropies.
_NOT_COMPUTED = ("distillation_use_topk", "distillation_only", "calculate_sum_pi_squared", "use_fused_kernels")


# Methods of verl's engine that the engine here overrides or calls.
_METHODS = (
    "_build_module",
    "_build_model_optimizer",
    "_gradient_sync_context(is_last_micro_batch)",
    "forward_backward_batch(loss_function)",
    "forward_step(loss_function)",
    "get_data_parallel_group",
    "get_data_parallel_size",
)


class _TreeEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's engine for language models with rows of treepack; `strategy` is the name that verl gives to its engine."""

    strategy: str
    ulysses_sequence_parallel_size: int

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        check_program("verl", FSDPEngineWithLMHead, _METHODS, user=type(self).__name__)
        _check_options(model_config, engine_config)
        super().__init__(
            model_config, replace(engine_config, strategy=self.strategy), optimizer_config, checkpoint_config
        )

    def _build_module(self) -> Any:
        register()
        # verl's default is flash attention, which transformers refuses to load if it is not installed.
        self.model_config.hf_config._attn_implementation = "sdpa"
        size, self.ulysses_sequence_parallel_size = self.ulysses_sequence_parallel_size, 1  # no patches of verl for it
        try:
            module = super()._build_module()
        except ImportError as error:
            if "AutoModelForCausalLMWithValueHead" not in str(error):
                raise
            raise TreepackError(
                "verl: it imports AutoModelForCausalLMWithValueHead, which the installed trl has removed; use an "
                "environment without trl for verl"
            ) from error
        finally:
            self.ulysses_sequence_parallel_size = size
        check_model(module)
        return module

    def _build_model_optimizer(self) -> None:
        super()._build_model_optimizer()
        lower = None if self._autocast_dtype == torch.float32 else self._autocast_dtype
        use_tree_attention(self.module, torch.device(get_device_name()), lower)
        share_rows(find_causal(self.module), self.ulysses_parallel_group)

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        """Run a mini-batch, and return what verl's engine returns: outputs in the order of `data`, losses, metrics."""
        get = tensordict_utils.get_non_tensor_data
        group = self.get_data_parallel_group()
        num_tokens, sequence_ranks = data["loss_mask"].sum().to(get_device_id()), self.ulysses_sequence_parallel_size
        distributed.all_reduce(num_tokens, group=group)
        # verl's losses divide by the last two.
        tensordict_utils.assign_non_tensor(
            data, sp_size=sequence_ranks, dp_size=self.get_data_parallel_size(), batch_num_tokens=num_tokens.item()
        )
        batches = _cut(data, group, routes=self._routes(data))
        outputs = []
        for i, indices in enumerate(batches):
            is_last = i == len(batches) - 1
            exchange = nullcontext() if forward_only else self._gradient_sync_context(is_last_micro_batch=is_last)
            with torch.set_grad_enabled(not forward_only), exchange:
                micro_batch = tensordict_utils.index_select_tensor_dict(data, indices)
                loss, output = self.forward_step(micro_batch, loss_function, forward_only)
                if not forward_only:
                    # FSDP takes the mean over all ranks, but the gradients of ranks that share rows are parts of a sum.
                    loss = loss * sequence_ranks
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                    if not get(data, "return_model_output", False):
                        del output["model_output"]  # of the size of the whole mini-batch, and unused in training
            outputs.append(output)
        # Without `use_dynamic_bsz` verl assumes that micro-batches are in the order of the data.
        return postprocess_batch_func(output_lst=outputs, indices=batches, data=TensorDict({}, batch_size=[]))

    def _routes(self, data: TensorDict) -> list[Tensor] | None:
        """Return the recorded experts of each sequence, [tokens, layers, k]; None if they are not replayed.

        Raises:
            TreepackError: they are to be replayed, and the batch has none.
        """
        if _replay_mode(self.engine_config) == "disabled":
            return None
        recorded = data.get("routed_experts", None)
        if recorded is None:
            raise TreepackError(
                "verl: router_replay.mode is R3, but the batch has no routed_experts; set "
                "rollout.enable_rollout_routing_replay=True"
            )
        return list(recorded.unbind())

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> tuple[Tensor, Any]:
        """Return the loss of a micro-batch, and what verl's engine returns beside it."""
        with_entropies = tensordict_utils.get_non_tensor_data(micro_batch, "calculate_entropy", False)
        sequences = _read_sequences(micro_batch)
        capacity = max(1, sum(len(each) for each in sequences))  # one row, whose backward pass needs no second forward
        options = OnlineOptions(capacity=capacity, with_entropies=with_entropies)
        routes = self._routes(micro_batch)
        rows = plan_batch(sequences, options=options, temperature=micro_batch["temperature"], routes=routes)
        micro_batch, rows = micro_batch.to(get_device_id()), rows.to(get_device_name())
        offsets = micro_batch["input_ids"].offsets()
        dtype = self._autocast_dtype
        with nullcontext() if dtype == torch.float32 else torch.autocast(get_device_name(), dtype):
            logprobs, entropies = batch_statistics(self.module, rows, options)
            model_output = {"log_probs": _to_predecessors(logprobs, offsets)}
            if with_entropies:
                model_output["entropy"] = _to_predecessors(entropies, offsets)
            if loss_function is None:
                loss, metrics = torch.ones((), device=get_device_name()), {}
            else:
                loss, metrics = loss_function(
                    model_output=model_output, data=micro_batch, dp_group=self.get_data_parallel_group()
                )
        return loss, {"model_output": detach_tree(model_output), "loss": loss.detach().item(), "metrics": metrics}


@EngineRegistry.register(model_type="language_model", backend="treepack", device=["cuda", "cpu"])
class TreeFSDP2Engine(_TreeEngine):
    """verl's FSDP2 engine on trees."""

    strategy = "fsdp2"


@EngineRegistry.register(model_type="language_model", backend="treepack_fsdp", device=["cuda", "cpu"])
class TreeFSDPEngine(_TreeEngine):
    """verl's FSDP engine on trees."""

    strategy = "fsdp"


@EngineRegistry.register(model_type="value_model", backend=["treepack", "treepack_fsdp"], device=["cuda", "cpu"])
class _RefusedValueEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    def __init__(self, **configs: Any) -> None:
        raise TreepackError("verl: a critic is not computed on trees; set critic.strategy=fsdp2")


def _replay_mode(engine_config: Any) -> str:
    """Return the mode of router_replay: verl's options of FSDP have none, so a command adds it, as a plain dict."""
    replay: Any = engine_config.router_replay
    mode: str = replay["mode"] if isinstance(replay, dict) else replay.mode
    return mode


def _check_options(model_config: Any, engine_config: Any) -> None:
    """Refuse options of verl that the engine does not compute.

    Raises:
        TreepackError: naming the option.
    """
    refused = {
        "model.use_fused_kernels": model_config.use_fused_kernels,
        "model.enable_activation_offload": model_config.enable_activation_offload,
        "model.mtp.enable": model_config.mtp.enable,
        "fsdp_config.pad_to_length": engine_config.pad_to_length,
        "fsdp_config.qat.enable": engine_config.qat.enable,
    }
    if _replay_mode(engine_config) == "R2":
        raise TreepackError(
            "verl: router_replay.mode R2 records the trainer's own experts, which strategy=treepack does not; use R3, "
            "which replays the routes of the rollout"
        )
    for name, value in refused.items():
        if value:
            raise TreepackError(f"verl: {name} is not supported by strategy=treepack; set it to False")
    if hasattr(model_config.hf_config, "vision_config"):
        raise TreepackError(
            f"verl: {model_config.hf_config.model_type} is a vision-language model; strategy=treepack computes text "
            "models only, so use strategy=fsdp2"
        )
    ranks, option = engine_config.ulysses_sequence_parallel_size, "ulysses_sequence_parallel_size"
    check_heads(model_config.hf_config.get_text_config(), ranks, "verl", option=option)


def _read_sequences(data: TensorDict) -> list[Tensor]:
    """Return the ids of each sequence.

    Raises:
        TreepackError: the batch asks for something that is not computed; the message names it.
    """
    get = tensordict_utils.get_non_tensor_data
    for name in _NOT_COMPUTED:
        if get(data, name, False):
            raise TreepackError(f"verl: {name} is not computed on trees; switch it off, or use strategy=fsdp2")
    mode = get(data, "pad_mode", DatasetPadMode.NO_PADDING)
    if mode != DatasetPadMode.NO_PADDING:
        raise TreepackError(f"verl: pad_mode is {mode}; strategy=treepack expects no_padding")
    ids, positions = data["input_ids"], data["position_ids"]
    # Jagged positions 0 1 2 0 1 of sequences of 3 and 2 tokens: each index less the start of its sequence.
    starts = torch.repeat_interleave(ids.offsets()[:-1], ids.offsets().diff())
    plain = torch.arange(len(ids.values()), device=starts.device) - starts
    if any(get(data, "multi_modal_inputs", [])) or positions.dim() != 2 or not torch.equal(positions.values(), plain):
        raise TreepackError(
            "verl: a micro-batch has images or positions that do not count its tokens from 0; strategy=treepack "
            "computes text models only"
        )
    return list(ids.unbind())


def _to_predecessors(values: list[Tensor], offsets: Tensor) -> Tensor:
    """Move the value of token j to place j - 1, and return a nested tensor with the offsets of the ids."""
    # The first token of a sequence has the value 0, which moves to the last place of the sequence before:
    # [0 a b] [0 c] -> a b 0 c 0
    return torch.nested.nested_tensor_from_jagged(torch.cat(values).roll(-1), offsets)


def _cut(data: TensorDict, group: Any, *, routes: list[Tensor] | None = None) -> list[list[int]]:
    """Return the indices of the sequences of each micro-batch; siblings together, equally many on every rank.

    verl's limit of tokens, times the ranks that share a row, holds for the row of a micro-batch, where a shared prefix
    counts once. A prefix is not shared where its `routes` differ.

    Raises:
        TreepackError: on all ranks, if one of them has fewer sequences than another has micro-batches.
    """
    get = tensordict_utils.get_non_tensor_data
    if get(data, "force_group_size", 1) != 1:
        raise TreepackError(
            "verl: force_group_size fixes the micro-batches; strategy=treepack cuts them itself, set it to 1"
        )
    values, offsets = (each.cpu().numpy() for each in (data["input_ids"].values(), data["input_ids"].offsets()))
    if routes is not None:
        joined = torch.cat(routes).cpu().numpy()
        values = route_symbols(
            values.astype(np.int32), as_routes(joined, len(values), source="verl", name="routed_experts")
        )
    if get(data, "use_dynamic_bsz", True):
        batches = micro_batches((values, offsets), int(data["max_token_len_per_gpu"]) * get(data, "sp_size", 1))
    else:
        size = int(data["micro_batch_size_per_gpu"])
        order = [i for batch in micro_batches((values, offsets), max(len(values), 1)) for i in batch]
        batches = [order[i : i + size] for i in range(0, len(order), size)]
    # The maximum of the counts, and the minimum of the numbers of sequences, in one message.
    limits = torch.tensor([len(batches), -len(offsets) + 1], device=get_device_name())
    distributed.all_reduce(limits, distributed.ReduceOp.MAX, group=group)
    count, fewest = int(limits[0]), -int(limits[1])
    if count > fewest:
        raise TreepackError(
            f"verl: a rank has {count} micro-batches and another one only {fewest} sequences; give all ranks the same "
            "number of sequences"
        )
    return _split(batches, count, np.diff(offsets).tolist())


def _split(batches: list[list[int]], count: int, lengths: list[int]) -> list[list[int]]:
    """Halve the micro-batch with the maximum of tokens until there are `count`."""
    result = list(batches)
    for _ in range(count - len(batches)):
        large = max(
            (i for i in range(len(result)) if len(result[i]) > 1), key=lambda i: sum(lengths[k] for k in result[i])
        )
        middle = len(result[large]) // 2
        result[large : large + 1] = [result[large][:middle], result[large][middle:]]
    return result

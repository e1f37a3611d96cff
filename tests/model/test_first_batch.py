"""The first batch of a model that treepack did not load: it is checked once, whatever is wrapped around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from support.fresh_processes import PROCESSES
from support.oracle_model import Sample, alone, gradients, make_row, tiny_model, worst_error
from support.refusal import refusal
from support.tiny_families import HAS_RECURRENT, KeepFloat64, tiny_family
from treepack.attention import register
from treepack.data.batch import make_batch
from treepack.errors import TreepackError
from treepack.model.accept.first_batch import _agree
from treepack.model.collation import batch_loss, collate
from treepack.model.head.logit_map import LogitMap
from treepack.model.head.output_head import logit_map_of

SAMPLES = [
    Sample((1, 2, 3, 4, 5), (0.0, 1.0, 0.0, 2.0, 1.0)),
    Sample((1, 2, 6), (0.0, 1.0, 1.0)),
    Sample((7, 8), (0.0, 0.5)),
]


def inputs() -> dict[str, Any]:
    return collate([make_batch(make_row(SAMPLES))])


def tree_model(kind: str = "qwen3", **options: Any) -> Any:
    register()
    return tiny_model(kind, attention="treepack_auto", **options)


class Calls:
    """The forward passes of a module, counted by a hook of the user."""

    def __init__(self, module: nn.Module) -> None:
        self.count = 0
        module.register_forward_hook(self.add)

    def add(self, *_: object) -> None:
        self.count += 1


def test_the_probe_runs_at_the_first_batch_only() -> None:
    model = tree_model()
    calls = Calls(model.base_model)
    counts = []
    for _ in range(3):
        before = calls.count
        batch_loss(model, inputs())
        counts.append(calls.count - before)
    assert counts == [6, 1, 1]  # a tree and its four branches, and the batch


def test_a_refused_model_is_refused_again() -> None:
    register()
    model = tiny_family("bloom", attention="treepack_auto")
    for _ in range(2):
        with pytest.raises(TreepackError, match=r"does not use transformers' attention interface|mask of its own"):
            batch_loss(model, inputs())


def test_the_check_leaves_everything_as_it_was() -> None:
    model = tree_model()
    Calls(model.model.layers[0])
    model.train()
    model.model.layers[1].eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    modes = [module.training for module in model.modules()]
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    random_state = torch.get_rng_state()
    with torch.no_grad():
        batch_loss(model, inputs())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in model.modules()] == modes
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks
    assert all(torch.equal(*pair) for pair in zip(model.buffers(), buffers, strict=True))
    assert all(parameter.grad is not None and bool((parameter.grad == 1).all()) for parameter in model.parameters())
    assert model.config._attn_implementation == "treepack_auto"


class ScaleInPlace(nn.Module):
    """A causal model that multiplies its logits by 2 in the memory of the output layer's result."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.plain = forward

    def forward(self, **options: Any) -> Any:
        output = self.plain(**options)
        output.logits.mul_(2)
        return output


def test_logits_that_are_scaled_in_place_give_the_gradients_of_the_scaled_logits() -> None:
    model, plain = tree_model(), tiny_model("qwen3")
    for each in (model, plain):
        each.forward = ScaleInPlace(each.forward).forward
    torch.autograd.backward(batch_loss(model, inputs()))
    assert logit_map_of(model) == LogitMap(2.0)
    assert worst_error(gradients(model), alone(plain, SAMPLES)[1]) < 1e-9


def changed(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the model with `change` applied to its logits."""
    plain = model.forward

    def forward(*args: Any, **options: Any) -> Any:
        output = plain(*args, **options)
        output.logits = change(output.logits)
        return output

    model.forward = forward
    return model


@pytest.mark.parametrize("cap", [30.0, 1000.0])
def test_a_cap_is_found_in_bfloat16_however_little_it_changes(cap: float) -> None:
    model = changed(tree_model(dtype=torch.bfloat16), lambda logits: cap * (logits.float() / cap).tanh())
    batch_loss(model, inputs())
    assert logit_map_of(model) == LogitMap(1.0, cap)


@pytest.mark.parametrize(("scale", "cap"), [(1.0, 2.0), (0.3, None), (-3.0, 5.0), (0.1, 0.5)])
def test_a_scale_and_a_cap_have_the_gradients_of_the_model_itself(scale: float, cap: float | None) -> None:
    def change(logits: Tensor) -> Tensor:
        return scale * logits if cap is None else cap * (scale * logits / cap).tanh()

    model, plain = (changed(each, change) for each in (tree_model(), tiny_model("qwen3")))
    torch.autograd.backward(batch_loss(model, inputs()))
    assert worst_error(gradients(model), alone(plain, SAMPLES)[1]) < 1e-9


OTHER_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "bias": lambda logits: logits + 0.5,
    "clamp": lambda logits: logits.clamp(-50, 50),
    "one word less": lambda logits: torch.cat([logits[..., :-1], logits[..., -1:] * 0], -1),
    "another order": lambda logits: logits.flip(-1),
    "zero": lambda logits: logits * 0,
    "normalised": lambda logits: logits - logits.mean(-1, keepdim=True),
    "NaN": lambda logits: logits * torch.nan,
}


@pytest.mark.parametrize("change", OTHER_CHANGES.values(), ids=OTHER_CHANGES)
def test_any_other_change_of_logits_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    model = changed(tree_model(), change)
    assert "logits are not its output layer" in refusal(batch_loss, model, inputs())


def checkpointed(model: Any) -> Any:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def mixed_precision(model: Any) -> Any:
    utilities: Any = pytest.importorskip("accelerate.utils")
    model.forward = utilities.convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    return model


WRAPPERS: dict[str, tuple[Callable[[Any], Any], AbstractContextManager[Any]]] = {
    "training mode with checkpointing": (checkpointed, nullcontext()),
    "autocast outside": (lambda model: model, torch.autocast("cpu", torch.bfloat16)),
    "autocast inside": (mixed_precision, nullcontext()),
    "bfloat16": (lambda model: model.bfloat16(), nullcontext()),
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_a_model_that_is_exact_passes_in_every_wrapper(name: str, kind: str) -> None:
    wrap, context = WRAPPERS[name]
    model = wrap(tree_model(kind, dtype=torch.float32))
    with context:
        first, second = (batch_loss(model, inputs()) for _ in range(2))
    torch.autograd.backward(first)
    plain = alone(tiny_model(kind, dtype=torch.float32), SAMPLES)[0]
    assert float(second.detach()) == pytest.approx(float(plain), rel=0.05)


def test_a_model_with_lora_passes_without_its_dropout() -> None:
    options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(tree_model(), peft.LoraConfig(lora_dropout=0.05, **options)).train()
    assert "dropout of 0.05 in training mode" in refusal(batch_loss, model, inputs())
    model = peft.get_peft_model(tree_model(), peft.LoraConfig(**options)).train()
    torch.autograd.backward(batch_loss(model, inputs()))
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


class Half(nn.Module):
    """A wrapper that hands only the first row of a batch to the model, as DataParallel does on each device."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **options: Any) -> Any:
        return self.inner(**{name: x[:1] if isinstance(x, Tensor) else x for name, x in options.items()})


def test_a_wrapper_that_splits_the_batch_is_refused() -> None:
    batch = collate([make_batch(make_row(SAMPLES, row_id=i)) for i in range(2)])
    assert "computed 8 tokens for a batch of 16" in refusal(batch_loss, Half(tree_model()), batch)


IS_OLD = Version(transformers.__version__) < Version("5.11")  # its tiny DeepSeek-V3 does not run


@pytest.mark.parametrize(
    "kind", ["mixtral", "qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.skipif(IS_OLD, reason="layout"))]
)
def test_experts_in_bfloat16_pass(kind: str) -> None:
    register()
    batch_loss(tiny_family(kind, attention="treepack_auto").bfloat16(), inputs())


@pytest.mark.slow
def test_a_compiled_model_is_checked_without_being_compiled_for_the_probe() -> None:
    register()
    refused = tiny_family("gpt_neox_japanese", attention="treepack_auto")
    assert "does not use transformers' attention interface" in refusal(batch_loss, torch.compile(refused), inputs())
    model = torch.compile(tree_model(dtype=torch.float32))
    expected = float(alone(tiny_model("qwen3", dtype=torch.float32), SAMPLES)[0])
    for _ in range(2):
        assert float(batch_loss(model, inputs())) == pytest.approx(expected, rel=1e-5)


def test_positions_that_change_the_rotary_frequencies_are_refused() -> None:
    register()
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = tiny_family("llama", attention="treepack_auto", rope_parameters=rope, max_position_embeddings=5)
    batch_loss(model, inputs())  # positions 0 .. 4
    longer = [Sample((1, 2, 3, 4, 5, 6), (0.0,) + (1.0,) * 5)]
    with pytest.raises(
        TreepackError, match=r"path of 6 tokens, .* exact on paths of up to 5, because its dynamic rotary"
    ):
        batch_loss(model, collate([make_batch(make_row(longer))]))


def shard(model: Any) -> Any:
    for layer in getattr(model.model, "decoder", model.model).layers:
        fully_shard(layer)
    return fully_shard(model)


def shard_without_reshard(model: Any) -> Any:
    return fully_shard(model, reshard_after_forward=False)


def shard_output_layer(model: Any) -> Any:
    fully_shard(model.lm_head)
    return shard(model)


def shard_flat(model: Any) -> Any:
    """FSDP1: the weights of a unit are one flat tensor; here the layers and the rest of the model."""
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


# Wrapper, model type, its options, and the refusal; None if the loss is exact.
Case = tuple[Callable[[Any], Any], str, dict[str, Any], str | None]
SHARDED: list[Case] = [
    (shard, "qwen3", {}, None),
    (shard, "stablelm", {}, "does not pass subtree_end on"),
    (shard_output_layer, "granite", {"logits_scaling": 8.0}, None),
    *([(shard, "qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, None)] if HAS_RECURRENT else []),
]
MORE_SHARDED: list[Case] = [
    (DistributedDataParallel, "qwen3", {}, None),
    (shard_without_reshard, "qwen3", {}, None),
    (shard, "opt", {}, None),
    (shard, "diffllama", {}, None),
    (shard_output_layer, "cohere", {"logit_scale": 0.3, "tie_word_embeddings": False}, None),
    (shard_flat, "qwen3", {}, None),
]


def run_rank(rank: int, folder: Path, cases: list[Case]) -> None:
    """Check every case, and that a complaint of rank 1 stops rank 0 too."""
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    register()
    for wrap, kind, fields, reason in cases:
        model = wrap(tiny_family(kind, attention="treepack_reference", **fields))
        with KeepFloat64():
            if reason is not None:
                with pytest.raises(TreepackError) as refusal:
                    batch_loss(model, inputs())
                assert reason in str(refusal.value), str(refusal.value)
                continue
            for _ in range(2):
                model.zero_grad()
                torch.autograd.backward(batch_loss(model, inputs()))
            expected = alone(tiny_family(kind, **fields), SAMPLES)[1]
        # Both ranks had the same batch, and the wrappers average.
        is_flat = isinstance(model, FullyShardedDataParallel)
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True) if is_flat else nullcontext():
            actual = {
                name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): whole(p.grad).clone()
                for name, p in model.named_parameters()
            }
        assert worst_error(actual, expected) < 1e-9, kind
    complaint = TreepackError("mine") if rank == 1 else None
    with pytest.raises(TreepackError, match="mine" if rank == 1 else "m: another rank refused the model"):
        _agree(complaint, [distributed.group.WORLD], torch.device("cpu"), "m")
    distributed.destroy_process_group()


def whole(gradient: Any) -> Tensor:
    tensor: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return tensor


@pytest.mark.slow
@pytest.mark.parametrize("cases", [SHARDED, MORE_SHARDED], ids=["few", "more"])
def test_sharded_models_are_exact_or_refused_on_all_ranks(tmp_path: Path, cases: list[Case]) -> None:
    torch.multiprocessing.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        run_rank, (tmp_path, cases), nprocs=2, start_method=PROCESSES.get_start_method()
    )

"""The functions of recurrent layers that transformers' models call, on trees.

    causal_conv1d_fn                       `convolution`
    torch_chunk_gated_delta_rule           `gated_delta_rule`      Qwen3-Next, Qwen3.5, OLMo Hybrid
    chunk_kimi_delta_attention             `gated_delta_rule`      Kimi Linear: a decay per key dimension
    mamba2_chunk_scan                      `state_space_scan`      Mamba-2: Nemotron-H, Granite 4, Bamba, Falcon-H1
    mamba2_split_conv1d_scan_combined      `no_fused_scan`         returns None: the model then calls the two parts

Each has the arguments of its namesake, and the options `subtree_end`, `schedule`, `record` and `carry` of
`attention.interface`. `entry` puts them in the place of their namesakes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from treepack.attention.dispatch import BatchSchedules
from treepack.errors import TreepackError
from treepack.recurrent import dispatch

# Arguments about the states of a cache; training has no cache.
_OF_CACHES = ("use_cache", "initial_state", "initial_states", "output_final_state", "return_final_states")
# Options that change no result. chunk_size only divides the sums of the usual scan.
_HARMLESS = frozenset(
    "subtree_end schedule record tree_pass".split()
    + "chunk_size position_embeddings position_ids cache_position layer_idx".split()
)
CONVOLUTION = "convolution"
_EPSILON = 1e-6  # of norms, in transformers and in flash-linear-attention


class RecurrentCall(NamedTuple):
    """One call of a recurrent layer: the name of its scan, or `CONVOLUTION`, and its dtype."""

    name: str
    dtype: torch.dtype


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any
) -> Tensor:
    """Compute `causal_conv1d_fn` on trees: x [B, C, T] and weight [C, W] in, [B, C, T] out."""
    run = _tree_functions(options, CONVOLUTION, x)
    # Models pass the transpose of [B, T, C], so that this is a view.
    tokens = x.mT.reshape(-1, x.shape[1])
    out: Tensor = run.convolve(tokens, weight, bias, activation)
    return out.reshape(len(x), -1, x.shape[1]).mT


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute `torch_chunk_gated_delta_rule` on trees: [B, T, Hk, K], [B, T, H, V] in, [B, T, H, V] out.

    `g` is [B, T, H], or [B, T, H, K] in KDA. No final state is returned.
    """
    run = _tree_functions(options, "gated delta rule" if g.ndim == 3 else "Kimi delta attention", value)
    scale = query.shape[-1] ** -0.5
    query, key = (normalise(query, scale), normalise(key)) if use_qk_l2norm_in_kernel else (query * scale, key)
    q, k, v, decay, rate = (x.flatten(0, 1) for x in (query, key, value, g, beta))
    out = run.scan(q, k, v, decay, rate)
    return out.view(value.shape), None


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 (the names of transformers, which passes some by name)
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **options: Any,
) -> Tensor:
    """Compute `mamba2_chunk_scan` on trees.

    Args:
        x: values, [batch, T, H, V].
        dt: time steps, [batch, T, H], before bias, softplus and limits.
        A: [H], negative; the decay of a token is exp(A * dt).
        B, C: keys and queries, [batch, T, groups, K].
        D: [H]; D x is added to the outputs, and nothing if D is None.
        dt_bias, dt_softplus, dt_limit: make time steps from `dt`: add the bias, take softplus, clamp to the limits.
        options: `subtree_end`, `schedule`, `record`, and a gate `z`, which must be None.

    Raises:
        TreepackError: if a gate or a state of a cache is given.
    """
    run = _tree_functions(options, "Mamba-2 scan", x)
    precision = torch.promote_types(x.dtype, torch.float32)
    step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    step = softplus(step) if dt_softplus else step
    step = step.clamp(*dt_limit).to(precision)
    g = A.to(precision) * step
    values = x.to(precision) * step[..., None]
    q, k, v, decay = (each.flatten(0, 1) for each in (C, B, values.to(x.dtype), g))
    out: Tensor = run.scan(q, k, v, decay, None).view(x.shape)
    return out if D is None else out + (D[:, None] * x).to(out.dtype)


def no_fused_scan(*_: Any, **__: Any) -> None:
    """Return None, so that the model computes convolution and scan one after the other."""


class _WholeRows(NamedTuple):
    """The functions of `dispatch` for rows with these tables; for rows in pieces see `carry.states.CarriedStates`."""

    schedules: BatchSchedules

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        return dispatch.convolve(x, weight, bias, activation, self.schedules)

    def scan(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        return dispatch.scan(q, k, v, g, beta, self.schedules)


def _tree_functions(options: dict[str, Any], name: str, values: Tensor) -> Any:
    """Return the two functions for the rows, whole, in pieces or shared by ranks, and record the call.

    Raises:
        TreepackError: if a state of a cache is given or asked for, or an option that has no meaning here.
    """
    asked = next((each for each in _OF_CACHES if options.get(each) is not None and options[each] is not False), None)
    if asked is not None:
        raise TreepackError(f"recurrent layer: the model uses {asked} in its {name}; call it with use_cache=False")
    # Another version of transformers may pass more. A gate that is ignored gives a wrong gradient and no error.
    unknown = next((each for each, setting in options.items() if each not in _HARMLESS and _is_set(setting)), None)
    if unknown is not None:
        raise TreepackError(
            f"recurrent layer: the model passes {unknown} to its {name}, which has no form on trees here; train "
            "another model, or use another version of transformers"
        )
    if options.get("record") is not None:
        options["record"].append(RecurrentCall(name, values.dtype))
    tree_pass = options.get("tree_pass")
    functions = _functions_of(tree_pass, options)
    return functions if tree_pass is None or tree_pass.share is None else tree_pass.share.recurrent(functions)


def _functions_of(tree_pass: Any, options: dict[str, Any]) -> Any:
    if tree_pass is not None and tree_pass.carry is not None:
        return tree_pass.carry.states
    schedules, end = options.get("schedule"), options["subtree_end"]
    if not isinstance(schedules, BatchSchedules):
        return _WholeRows(BatchSchedules(end))
    schedules.check(end)
    return _WholeRows(schedules)


def _is_set(setting: Any) -> bool:
    # None and False -> False; a tensor is set, whatever its values are
    return setting is not None and setting is not False


def normalise(x: Tensor, scale: float = 1.0) -> Tensor:
    """Return `x` [..., K] divided by its Euclidean norm over K, times `scale`; float64 of float64, else float32."""
    y: Tensor = _NormaliseRows.apply(x, scale)  # type: ignore[no-untyped-call]
    return y


class _NormaliseRows(torch.autograd.Function):
    """y = scale x r with r = 1 / sqrt(|x|^2 + epsilon), so dx = scale r (dy - x r^2 (x dy)).

    Between forward and backward only x and r are in memory, not the float32 values in between.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        r = torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPSILON)
        ctx.save_for_backward(x, r)
        ctx.scale = scale
        return wide * (scale * r)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, r = ctx.saved_tensors
        (dy,) = gradients
        wide = x.to(r.dtype)
        along = (wide * dy).sum(-1, keepdim=True)
        return ((dy - wide * (r.square() * along)) * (ctx.scale * r)).to(x.dtype), None

"""The part of a comparison of gradients that fits into memory: an estimate from the shape of a model.

    free bytes, ModelSizes --plan_memory--> MemoryPlan: recompute the layers or not; maximum tokens of a row, of all
                                            trajectories run alone, and of one of them

The memory of a comparison has a fixed part (two sets of gradients, a chunk of logits) and a part per token:

    kept        every layer keeps its activations until the backward pass      layers * layer_bytes per token
    recomputed  every layer keeps its input, one layer at a time has the rest  layers * hidden + layer_bytes per token

The estimate is coarse: if memory runs out all the same, the caller plans again with half of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from treepack.attention.reference import QUERIES
from treepack.costs.recurrent_cost import FAMILIES, recurrent_part
from treepack.model.accept.compatibility import count_attention_layers
from treepack.model.experts.active import num_weights
from treepack.model.layers import head_widths, layer_values
from treepack.recurrent.chunks import CHUNK

# Share of the free memory to plan with. The rest is for fragments, kernels and the error of the estimate.
_USABLE = 0.8
# Maximum floating-point operations of the trajectories one by one on a GPU. Together with the packed row that takes two
# to three minutes on an H200, in float32 at 5 (attention of the row) to 40 TFLOP/s (products with weights).
MAX_OPERATIONS = 2e15
# Targets whose logits are in memory at a time; smaller than in training, which has no weights in float64.
LOGITS_CHUNK = 512


@dataclass(frozen=True)
class ModelSizes:
    """The numbers of a model on which memory depends; `item` is the bytes of one number.

    `quadratic` means that a trajectory run alone has its whole matrix of scores in memory, and `reference` that the
    packed row runs under the reference attention.
    """

    parameters: int
    trained: int  # parameters with a gradient
    embeddings: int
    layers: int
    hidden: int
    heads: int
    head_size: int
    projections: int  # numbers of query, key and value of one token in one layer
    intermediate: int
    item: int
    quadratic: bool
    reference: bool
    attention_layers: int  # of all layers
    scan: int = 0  # numbers that the scan of a recurrent layer keeps and needs for one token

    @property
    def layer_bytes(self) -> int:
        """Bytes per token that a layer keeps for its backward pass, and needs in it."""
        # Norms, residuals and attention output: about 14 tensors as wide as the hidden state. Query, key and value
        # before and after norm and rotation: 6 times. Gate, up, activation, product and their gradients: 7 times.
        wide = 14 * self.hidden + 6 * self.projections + 7 * self.intermediate
        # Scores, mask, softmax and gradient of a block of queries, divided over the keys.
        scores = 4 * QUERIES * self.heads if self.reference else 0
        return self.item * (wide + max(scores, self.scan))


@dataclass(frozen=True)
class MemoryPlan:
    """The limits of a comparison: `max_tokens` of a row, `max_flat` of its trajectories, `max_depth` of one of them.

    With `recompute`, layers run again in the backward pass. With `offload`, the first set of gradients waits in CPU
    memory.
    """

    recompute: bool
    offload: bool
    max_tokens: int
    max_flat: int
    max_depth: int

    def halved(self) -> MemoryPlan:
        """Return the plan for half of the tokens, with everything that saves memory."""
        return MemoryPlan(True, True, self.max_tokens // 2, self.max_flat, min(self.max_depth, self.max_tokens // 2))


def plan_memory(
    sizes: ModelSizes, free: float, longest_row: int, *, longest_path: int = 0, max_operations: float | None = None
) -> MemoryPlan:
    """Return the largest comparison that fits into `free` bytes beside the weights.

    Args:
        sizes: the model.
        free: bytes that are free when the weights are in place.
        longest_row: tokens of the longest row, for which nothing is recomputed if that fits.
        longest_path: tokens of the longest trajectory, on which the cost of attention depends.
        max_operations: maximum floating-point operations; None for any number.
    """
    gradients = sizes.trained * sizes.item
    # Logits of a chunk with their softmax and gradient; the gradient of the output layer of a chunk, of the chunks
    # before it, and their sum.
    fixed = (4 * LOGITS_CHUNK * sizes.embeddings // max(1, sizes.hidden) + 3 * sizes.embeddings) * sizes.item
    # The second set of gradients stays beside the first one unless tokens need its place.
    one, both = (max(0.0, _USABLE * (free - sets * gradients) - fixed) for sets in (1, 2))
    kept = sizes.layers * sizes.layer_bytes
    recomputed = sizes.layers * sizes.hidden * sizes.item + sizes.layer_bytes
    limit = _limit_operations(sizes, longest_path, max_operations)
    # From the fastest way to the smallest memory: (bytes for tokens, bytes per token, recompute, offload).
    ways = ((both, kept, False, False), (both, recomputed, True, False), (one, recomputed, True, True))
    budget, per_token, recompute, offload = next((way for way in ways if way[0] >= way[1] * longest_row), ways[-1])
    max_tokens = depth = max(2, int(min(budget / per_token, longest_row, limit)))
    if sizes.quadratic:  # 3 matrices of scores [heads, n, n]: n = sqrt(bytes / (3 heads item))
        depth = min(depth, max(2, int((budget / (3 * sizes.heads * sizes.item)) ** 0.5)))
    return MemoryPlan(recompute, offload, max_tokens, limit, depth)


def _limit_operations(sizes: ModelSizes, depth: int, max_operations: float | None) -> int:
    # Forward, backward (twice as much) and the layers again: 8 operations per weight and token. Attention computes
    # 4 operations per visible key and number of a query, half of `depth` keys, and 2.5 times as much backward.
    attention = 4.5 * 4 * sizes.attention_layers * sizes.heads * sizes.head_size * depth / 2
    return 1 << 62 if max_operations is None else max(2, int(max_operations / (8 * sizes.parameters + attention)))


def model_sizes(model: Any, *, attention: str, attention_alone: str = "sdpa") -> ModelSizes:
    """Return the sizes of a model of transformers: rows run under `attention`, trajectories under `attention_alone`."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    width = head_widths(config)[-1]
    kv_heads = max(number or heads for number in layer_values(config, "num_key_value_heads"))
    # Names of the width of a layer's network; a mixture of experts runs some of its experts for each token.
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    dense = max(size or 0 for name in names for size in layer_values(config, name)) or 4 * config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None) or 0
    sparse = experts * (getattr(config, "moe_intermediate_size", None) or dense)
    dtype, device = model.dtype, model.device
    # Fused attention of torch takes float32 on a GPU, and both on a CPU; eager attention never is.
    fused = attention_alone == "sdpa" and (device.type == "cpu" or dtype == torch.float32)
    return ModelSizes(
        parameters=sum(num_weights(p) for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        embeddings=model.get_output_embeddings().weight.numel(),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        head_size=width,
        projections=(heads + 2 * kv_heads) * width,
        intermediate=max(dense, sparse),
        item=dtype.itemsize,
        quadratic=not fused,
        reference=attention == "reference",
        attention_layers=count_attention_layers(config),
        scan=_scan_numbers(config.to_dict()),
    )


def _scan_numbers(config: dict[str, Any]) -> int:
    """Return the numbers that the scan of one layer in plain torch keeps and needs for one token; 0 without a scan."""
    if config.get("model_type") not in FAMILIES:
        return 0
    part = recurrent_part(config, "the model")
    keys, values = part.key_size, part.value_size
    # Twice the numbers kept for the backward pass: 9 tensors as wide as the keys, 3 as the values, 6 rows of pairs in a
    # chunk, and the state of the chunk. Measured peaks are 0.7 to 0.9 of this.
    numbers = 2 * (9 * keys + 3 * values + 6 * CHUNK + keys * values // CHUNK)
    if config["model_type"] in ("kimi_linear", "bailing_hybrid"):
        numbers += 8 * CHUNK * keys  # a decay for each key dimension: pairs of a chunk times its keys
    return part.heads * numbers

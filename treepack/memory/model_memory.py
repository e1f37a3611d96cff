"""GPU memory of training a model on rows, and on rows in pieces, estimated from its config.json.

    preset | config.json | folder --read_memory--> ModelMemory, or NoPieces for a model without a forecast of pieces
    ModelMemory --in_rows, in_pieces--> bytes for rows of some tokens

The estimate holds for one GPU that has the whole model, float32 weights with AdamW, bfloat16 under autocast, compiled
layers, and no other option. A layer keeps these tensors of each token for its backward; h is the hidden size, q, k, v
and o the widths of queries, keys, values and outputs of attention, and i the width of the feed-forward network:

    residual stream, twice, in float32             8 h
    normed input of both halves                    4 h
    queries and keys, before and after rotation    4 q + 4 k
    values, outputs, log-sum-exps                  2 v + 2 o + 4 heads
    gate, up and their product                     6 i    as many values as weights / h, so also with two matrices

Under checkpointing it keeps its input and the output of its attention. Of a mixture, the chosen experts count, and
their inputs and outputs besides. The peak also has one layer in its backward, which holds as much again, and the logits
of one chunk. Measured peaks of rows of 65,536 tokens are within 2 % of the estimate; shorter rows need up to a quarter
more, because the estimate omits memory that does not depend on tokens (docs/forecast.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from treepack.costs.model_cost import feed_forward, is_sparse, language_model, num_experts, read_model_fields, shape_of
from treepack.costs.model_fields import RECURRENT, Config, list_layers, read_field

# Float32 weight, gradient, and two moments of AdamW.
PARAMETER_BYTES = 16
# Targets of a chunk of the loss, whose logits and their gradients are in memory, in bfloat16:
# `model.head.token_loss.CHUNK`.
LOSS_CHUNK, LOGIT_BYTES = 2048, 4


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes of a model on one GPU.

    Attributes:
        num_layers: number of layers.
        state: weights, gradients and the optimiser.
        logits: logits of one chunk of the loss, and their gradients.
        keys_values: keys and values of all layers per token; the sums of their gradients have twice as many.
        outputs: outputs of attention of all layers with log-sum-exps, per token.
        log_sums: the log-sum-exps among them.
        checkpoints: inputs of all layers in float32, per token.
        layers: everything that all layers keep for each token without checkpointing.
        layer: tensors of one layer in its backward and of the ends of the model, per token.
    """

    num_layers: int
    state: int
    logits: int
    keys_values: int
    outputs: int
    log_sums: int
    checkpoints: int
    layers: int
    layer: int

    @property
    def staged(self) -> int:
        """Bytes on the GPU of each carried token in host memory: two layers at a time, and all log-sum-exps.

        A layer has keys, values and the sums of their gradients.
        """
        return -(-2 * 3 * self.keys_values // self.num_layers) + self.log_sums

    def in_rows(self, tokens: int, recomputed: int) -> int:
        """Return the bytes of training rows of at most `tokens` tokens, `recomputed` of whose layers run again."""
        kept = self.num_layers - recomputed
        stored = recomputed * (self.checkpoints + self.outputs) + kept * self.layers
        return self.state + self.logits + tokens * (-(-stored // self.num_layers) + self.layer)

    def fewest_recomputed(self, tokens: int, limit: float) -> int:
        """Return the minimum number of recomputed layers with which rows fit into `limit` bytes, all if none does."""
        whole, one = self.in_rows(tokens, 0), tokens * (self.layers - self.checkpoints - self.outputs)
        # Each recomputed layer stores less by the same number of bytes.
        needed = math.ceil((whole - limit) * self.num_layers / one)
        return min(max(needed, 0), self.num_layers)

    def in_pieces(self, tokens: int, piece: int, path: int) -> int:
        """Return the bytes on the GPU of training rows of at most `tokens` tokens in pieces of `piece`.

        `path` is the maximum number of carried tokens, which wait in host memory. Layers of a piece keep their
        activations. Keys and values of a piece are also in the buffer of the path; a row that is one piece has none.
        """
        own = min(piece, tokens)
        buffer = own * self.keys_values if tokens > piece else 0
        return self.state + self.logits + own * (self.layers + self.layer) + path * self.staged + buffer


@dataclass(frozen=True, slots=True)
class NoPieces:
    """A model whose memory in pieces is not forecast, and the reason."""

    reason: str


def read_memory(model: str) -> ModelMemory | NoPieces:
    """Return the memory of a model, which is named as for `model_cost.read_shape`.

    Raises:
        TreepackError: the model does not exist, a size is missing, or the cost of a layer is not known.
    """
    config, name = read_model_fields(model)
    return memory_of(config, name=name)


def memory_of(config: Config, *, name: str) -> ModelMemory | NoPieces:
    """Return the memory that the fields of a config.json give; `name` is for errors.

    Raises:
        TreepackError: a field is missing or not a positive integer, or the cost of a layer is not known.
    """
    config = language_model(config)
    kinds = list_layers(config, name)
    if (reason := _obstacle(kinds)) is not None:
        return NoPieces(reason)
    hidden, heads = (read_field(config, key, name) for key in ("hidden_size", "num_attention_heads"))
    queries, keys, values, outputs = _widths(config, hidden, heads, name)
    sparse = _num_sparse(config, kinds)
    chosen = read_field(config, "num_experts_per_tok", name, config.get("num_experts_per_token")) if sparse else 0
    attention = 12 * hidden + 4 * queries + 4 * keys + 2 * values + 2 * outputs + 4 * heads
    # 3 h i weights of gate, up and down -> 3 i values of 2 bytes. Inputs and outputs of an expert have h values each.
    layers = len(kinds) * attention + 2 * feed_forward(config, kinds, name) // hidden + sparse * 4 * hidden * chosen
    count = len(kinds)
    return ModelMemory(
        num_layers=count,
        # Every expert has weights and their optimiser; only the chosen ones have activations.
        state=PARAMETER_BYTES * count_weights(config, name=name).total,
        logits=LOSS_CHUNK * LOGIT_BYTES * read_field(config, "vocab_size", name),
        keys_values=2 * (keys + values) * count,
        outputs=(2 * outputs + 4 * heads) * count,
        log_sums=4 * heads * count,
        checkpoints=4 * hidden * count,
        layers=layers,
        # Before and after the layers: embeddings and the residual in float32, the normed output in bfloat16.
        layer=-(-layers // count) + 10 * hidden,
    )


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """Weights of a model: all of them, embeddings and output layer, an average layer, and its experts."""

    total: int = 0
    ends: int = 0
    layer: int = 0
    experts: int = 0


def count_weights(config: Config, *, name: str) -> WeightCounts:
    """Return the weights of a model by the fields of its config.json; norms and biases are left out.

    Raises:
        TreepackError: as `memory_of`.
    """
    config = language_model(config)
    shape, kinds, experts = shape_of(config, name=name), list_layers(config, name), num_experts(config)
    ends = shape.output * (1 if config.get("tie_word_embeddings") else 2)
    one, every = shape.weights, shape.weights
    if experts:
        one, every = (shape_of(config | {"num_experts_per_tok": n}, name=name).weights for n in (1, experts))
    # A layer of 8 experts has 8 times the difference of 8 and 1 of them, over 7.
    inside = (every - one) * experts // max(1, experts - 1) // max(1, _num_sparse(config, kinds))
    return WeightCounts(every + ends, ends, every // len(kinds), inside)


def _num_sparse(config: Config, kinds: list[str]) -> int:
    return sum(is_sparse(config, layer) for layer in range(len(kinds))) if num_experts(config) else 0


def _obstacle(kinds: list[str]) -> str | None:
    """Return why the memory of a model in pieces is not forecast; None if it is."""
    for layer, kind in enumerate(kinds):
        if kind in RECURRENT:
            layers = "a short convolution" if kind == "conv" else "recurrent"
            return f"layer {layer} is {layers}, and the memory of its states depends on the branches of a row"
    return None


def _widths(config: Config, hidden: int, heads: int, name: str) -> tuple[int, int, int, int]:
    """Return the widths of queries, keys, values and outputs of one layer's attention."""
    if config.get("kv_lora_rank") is not None:  # latent attention: every head has keys and values of its own
        rotated, plain = (read_field(config, key, name) for key in ("qk_rope_head_dim", "qk_nope_head_dim"))
        value = heads * read_field(config, "v_head_dim", name)
        return heads * (rotated + plain), heads * (rotated + plain), value, value
    size = read_field(config, "head_dim", name, hidden // heads)
    groups = read_field(config, "num_key_value_heads", name, heads)
    return heads * size, groups * size, groups * size, heads * size

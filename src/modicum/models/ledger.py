"""What the built-in decoder spends, by arithmetic: weights, saved activations, workspace, work.

The counts follow `llama.py`, `mixers.py` and `mlps.py` line by line; a test holds them against the
tensors that autograd really saves.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from modicum.core.ledger import ALWAYS, Entry, Ledger, Phase, Shape, Work
from modicum.models.config import ModelConfig

_SAVED: tuple[Phase, ...] = ("forward", "loss", "backward")
_UNTIL_BACKWARD: tuple[Phase, ...] = ("forward", "loss")
# Layers that read one tensor: their input is saved once.
_INPUTS = {
    "self_attn.q_proj": "mixer input",
    "self_attn.k_proj": "mixer input",
    "self_attn.v_proj": "mixer input",
    "self_attn.o_proj": "attention output",
    "mlp.gate_proj": "mlp input",
    "mlp.up_proj": "mlp input",
    "mlp.down_proj": "mlp product",
}


def ledger(
    config: ModelConfig,
    shape: Shape,
    *,
    trained: bool,
    saved_inputs: Collection[str] = (),
    recompute: bool = False,
) -> Ledger:
    """The decoder's ledger at the shape of a micro-batch.

    Args:
        trained: whether all weights take gradients; else they are frozen.
        saved_inputs: of frozen linear layers, those whose input is kept all the same, because an
            adapter needs it.
        recompute: whether blocks keep their input alone and run again in the backward pass.
    """
    block = [
        _block_bytes(config, shape, trained, saved_inputs, layer) for layer in range(config.layers)
    ]
    kept = shape.positions * config.width * shape.residual_bytes
    activations = [kept] * config.layers if recompute else block
    weights = config.parameter_count() * shape.weight_bytes
    whole, last = sum(activations), activations[0] if not recompute else kept
    live = max(block) if recompute else 0
    return Ledger.of(
        Entry("weight", weights, what="model"),
        *_logits(config, shape, trained),
        Entry("activation", whole, _UNTIL_BACKWARD, "activations"),
        Entry("activation", last, ("backward",), "activations"),
        Entry("activation", live, ("backward",), "activations of a block, recomputed"),
        Entry("workspace", _block_workspace(config, shape), ("forward", "backward")),
        Entry("workspace", _casts(config, shape, trained), _SAVED, "weights in bf16"),
        Entry("buffer", _sequence_bytes(config, shape), _SAVED, "positions, masks"),
        Entry("buffer", _batch_bytes(shape), _SAVED, "tokens"),
        *_work(config, shape, trained, recompute),
    )


def _block_bytes(
    config: ModelConfig, shape: Shape, trained: bool, saved_inputs: Collection[str], layer: int
) -> int:
    """What autograd keeps of one block."""
    c, r, width = shape.compute_bytes, shape.residual_bytes, config.width
    queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    differentiable = trained or layer > 0  # frozen, the first block's input needs no gradient
    prefix = f"model.layers.{layer}."
    inputs = {
        kind
        for name, kind in _INPUTS.items()
        if trained or prefix + name in saved_inputs
    }
    adapted = trained or bool(saved_inputs)
    per_position = width * r + 4  # the second norm's input and its inverse scale
    per_position += (width * r + 4) if differentiable else 0
    per_position += width * c * (("mixer input" in inputs) + ("mlp input" in inputs))
    # Attention keeps rotated q and k, v, its output and the log-sum-exp; the output is the input
    # of o_proj and so is kept once.
    per_position += (2 * queries + 2 * keys) * c + 4 * config.heads
    # silu keeps gate; its product keeps silu(gate) and up; the product is down_proj's input.
    per_position += config.mlp_width * c * (3 + ("mlp product" in inputs))
    return per_position * shape.positions if adapted or differentiable else 0


def _logits(config: ModelConfig, shape: Shape, trained: bool) -> list[Entry]:
    """The head: cross-entropy holds logits and log-probabilities, then their gradients."""
    scores = shape.positions * config.vocabulary_size
    hidden = shape.positions * config.width
    norm = hidden * shape.residual_bytes + 4 * shape.positions
    cast = scores * shape.compute_bytes if shape.compute_bytes != 4 else 0
    kept = norm + (hidden * shape.compute_bytes if trained else 0)
    return [
        Entry("activation", kept, _UNTIL_BACKWARD, "last norm"),
        Entry("workspace", 8 * scores + cast, ("forward",), "logits"),
        Entry("workspace", 12 * scores, ("loss",), "logits and gradients"),
        Entry("workspace", 8 * scores + cast, ("evaluation",), "logits"),
        Entry("workspace", _block_workspace(config, shape), ("evaluation",)),
        Entry("buffer", _sequence_bytes(config, shape), ("evaluation",), "positions, masks"),
    ]


def _block_workspace(config: ModelConfig, shape: Shape) -> int:
    """Gradients that live within one block's backward: of the MLP's inner tensors, largest."""
    inner = 3 * config.mlp_width + 2 * config.width
    return inner * shape.positions * shape.compute_bytes


def _casts(config: ModelConfig, shape: Shape, trained: bool) -> int:
    """Under autocast a trained weight has a bf16 copy from its first use until backward."""
    if not trained or shape.compute_bytes == 4:
        return 0
    shapes = config.parameter_shapes()
    linear = sum(math.prod(size) for name, size in shapes.items() if len(size) == 2)
    if not config.tied_embeddings:
        linear -= config.vocabulary_size * config.width
    return linear * shape.compute_bytes


def _sequence_bytes(config: ModelConfig, shape: Shape) -> int:
    """Rotary tables for each position, and the mask over documents where rows hold several."""
    rows = shape.positions if shape.segments else shape.tokens
    tables = rows * config.head_width * shape.compute_bytes
    mask = shape.sequences * shape.tokens**2 * shape.compute_bytes if shape.segments else 0
    return tables + mask


def _batch_bytes(shape: Shape) -> int:
    """Token ids and labels of all micro-batches of an update, and their document numbers."""
    each = 8 + 8 + (4 if shape.segments else 0)
    return each * shape.positions * shape.micro_batches


def _work(config: ModelConfig, shape: Shape, trained: bool, recompute: bool) -> list[Work]:
    shapes = config.parameter_shapes()
    linear = sum(
        math.prod(size)
        for name, size in shapes.items()
        if len(size) == 2 and name != "model.embed_tokens.weight"
    )
    if config.tied_embeddings:
        linear += config.vocabulary_size * config.width
    products = 2 * shape.positions * linear
    attention = 4 * shape.positions * shape.tokens * config.heads * config.head_width
    attention *= config.layers
    forward = products + attention
    head = 2 * shape.positions * config.vocabulary_size * config.width
    backward = (2 if trained else 1) * products + 2 * attention
    if recompute:
        backward += forward - head
    dtype = "bfloat16" if shape.compute_bytes == 2 else "float32"
    return [
        Work(forward, dtype=dtype, phase="forward"),
        Work(backward, dtype=dtype, phase="backward"),
    ]


def optimizer_ledger(trained: int, shape: Shape, largest: int) -> Ledger:
    """Gradients and AdamW's two moments for `trained` fp32 elements, the largest tensor of them.

    One micro-batch: gradients fill up as the backward pass goes. Several: they stay between
    micro-batches, and a new one is made beside the sum that it is added to.
    """
    several = shape.micro_batches > 1
    phases: tuple[Phase, ...] = ("backward", "step")
    if several:
        phases = ("forward", "loss", "backward", "step")
    return Ledger.of(
        Entry("gradient", 4 * trained, phases, "gradients"),
        Entry("workspace", 4 * largest if several else 0, ("backward",), "a new gradient"),
        Entry("optimizer", 8 * trained, ALWAYS, "AdamW moments"),
    )

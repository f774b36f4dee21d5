"""What the built-in decoder spends, by arithmetic: weights, saved activations, workspace, work.

The counts follow `llama.py`, `mixers.py` and `mlps.py` line by line; tests hold them against the
tensors that autograd really saves, the peak that the meter sees and PyTorch's own FLOP counter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from modicum.core.contracts.ledger import (
    ALWAYS,
    Entry,
    Ledger,
    ModelQuery,
    Phase,
    Work,
)
from modicum.core.heap import mapped_from
from modicum.models.config import ModelConfig
from modicum.models.ledger_block import DecoderBlock
from modicum.models.ledger_head import Head
from modicum.models.ledger_layout import held, parts, weight_bytes
from modicum.models.ledger_parts import AdapterActivations

__all__ = ["AdapterActivations", "held", "kept_by_block", "ledger", "slack", "weight_bytes"]

_SAVED: tuple[Phase, ...] = ("forward", "loss")
_GENERATOR_BYTES = 5056  # the state of torch's generator, which a recomputed block restores


def ledger(
    config: ModelConfig,
    shape: ModelQuery,
    *,
    adapted: AdapterActivations | None = None,
    recompute: bool = False,
) -> Ledger:
    """The decoder's ledger at the shape of a micro-batch; gradients that stay are not in it.

    A phase that has several bad moments represents the worst of them.

    Args:
        adapted: the adapters of the frozen decoder; None where every weight is trained.
        recompute: whether blocks keep their input alone and run again in the backward pass.

    Raises:
        InputError: all weights are trained, and the linear layers' form takes no gradients.
    """
    blocks, head = parts(config, shape, adapted)

    def counting(counts: Callable[[int], bool]) -> list[Entry]:
        counted = [block.counting(counts) for block in blocks]
        return _entries(counted, replace(head, counts=counts), recompute)

    whole, least = _entries(blocks, head, recompute), mapped_from()
    large, small = counting(lambda size: size >= least), counting(lambda size: size < least)
    sizes = zip(whole, large, small, strict=True)
    return Ledger.of(
        Entry("weight", weight_bytes(config, shape.weight_bytes), what="model"),
        *(replace(a, large=min(a.bytes, b.bytes), rest=c.bytes) for a, b, c in sizes),
        Entry("buffer", _batch_bytes(shape), ALWAYS, "tokens"),
        *_work(blocks, head, recompute),
    )


def _entries(blocks: list[DecoderBlock], head: Head, recompute: bool) -> list[Entry]:
    """What comes and goes, of the tensors that count; also entries of no bytes."""
    config, shape = head.config, head.shape
    again = {block.prefix for block in blocks if recompute and block.keeps}
    kept = _kept(blocks, again)
    copies = [0 if block.prefix in again else block.casts for block in blocks]
    first, last = next((b for b in blocks if b.keeps), blocks[-1]), blocks[-1]
    live = first.rerun if recompute else first.saved + first.casts
    logits, inner, mask = head.logits, max(block.inner for block in blocks), _mask_bytes(shape)
    # While a block runs forward, what it and those after it keep is not there yet.
    running = max(
        (block.running if block.keeps and block.prefix not in again else block.inner)
        - sum(kept[n:])
        for n, block in enumerate(blocks)
    )
    computed = head.computed
    copied = computed if shape.compute_bytes < 4 else 0
    scoring = max(2 * logits + copied, computed + head.product.forward)
    # Where nothing is kept, positions and masks are gone when tokens are scored.
    places = head.tensor(mask) + _rotary_bytes(config, head)
    # Two booleans, and a second mask.
    building = 2 * head.tensor(mask // shape.compute_bytes) + head.tensor(mask)
    passing = places + max(inner, first.stream + building)
    at_loss = [
        3 * logits,  # the logits' logarithms, their gradient and the gradient before the softmax
        logits + last.stream * head.flows + head.gradient_made,
        computed + last.stream * head.flows + head.product.inputs,
        head.norm_undone - head.saved,
        _begun(last, head, again),
    ]
    undoing = [first.undoing(again=first.prefix in again) - head.gradients_to_come([first])]
    # A wider block is undone when those before it have kept what they keep, and no gradients.
    undoing += [
        sum(kept[:n] + copies[:n])
        + block.undoing(again=block.prefix in again)
        - head.gradients_to_come(blocks[: n + 1])
        for n, block in enumerate(blocks)
        if block.larger(first)
    ]
    if not any(block.keeps for block in blocks):  # the head's backward pass is all there is
        undoing = [head.saved + max(at_loss)]
    at_end = max([*undoing, head.embedding_work, 0])
    casts = sum(block.casts for block in blocks) + head.casts
    return [
        Entry("activation", sum(kept) + head.saved, _SAVED, "activations"),
        Entry("activation", min(live, at_end), ("backward",), "activations of one block"),
        Entry("workspace", max(scoring, passing), ("evaluation",), "logits"),
        Entry("workspace", max(scoring, running - head.saved, 0), ("forward",), "logits"),
        Entry("workspace", max(*at_loss, 0), ("loss",), "logits and gradients"),
        Entry("workspace", max(at_end - live, 0), ("backward",), "gradients of a block"),
        Entry("workspace", casts, ("evaluation", "forward"), "weights in bf16"),
        Entry("workspace", sum(copies) + head.casts, ("loss",), "weights in bf16"),
        Entry("buffer", places, _read(blocks, first, recompute), "positions, masks"),
    ]


def kept_by_block(
    config: ModelConfig,
    shape: ModelQuery,
    *,
    adapted: AdapterActivations | None = None,
    recompute: bool = False,
) -> list[int]:
    """Bytes that each block keeps until its backward pass is over, weights' copies too."""
    blocks, _ = parts(config, shape, adapted)
    again = {block.prefix for block in blocks if recompute and block.keeps}
    copies = [0 if block.prefix in again else block.casts for block in blocks]
    return [sum(each) for each in zip(_kept(blocks, again), copies, strict=True)]


def _kept(blocks: list[DecoderBlock], again: set[str]) -> list[int]:
    return [
        block.entered + block.tensor(_GENERATOR_BYTES) if block.prefix in again else block.saved
        for block in blocks
    ]


def slack(
    config: ModelConfig,
    shape: ModelQuery,
    *,
    adapted: AdapterActivations | None = None,
    recompute: bool = False,
) -> int:
    """How far the begin of the blocks' backward passes is below the worst of phase `loss`."""
    blocks, head = parts(config, shape, adapted)
    again = {block.prefix for block in blocks if recompute and block.keeps}
    whole = ledger(config, shape, adapted=adapted, recompute=recompute)
    return whole.bytes("workspace", "loss") - max(_begun(blocks[-1], head, again), 0)


def _begun(last: DecoderBlock, head: Head, again: set[str]) -> int:
    """Bytes in the last block's backward pass at most, beyond all that the forward pass keeps."""
    runs = last.prefix in again
    kept = last.entered if runs else last.saved + last.casts
    there = last.undoing(again=runs) - (kept if last.keeps else 0)
    return there + head.gradient_held - head.saved - head.casts


def _read(blocks: list[DecoderBlock], first: DecoderBlock, recompute: bool) -> tuple[Phase, ...]:
    """The phases in which a block that attends may need its positions and masks."""
    if recompute and first.keeps:
        return ("forward", "loss", "backward")
    backward: tuple[Phase, ...] = ("backward",) if first.mixes else ()
    return ("forward", *(("loss",) if any(b.mixes for b in blocks) else ()), *backward)


def _rotary_bytes(config: ModelConfig, head: Head) -> int:
    """Cosine and sine of each position, where documents restart of each row."""
    rows = head.shape.positions if head.shape.segments else head.shape.tokens
    return 2 * head.tensor(rows * config.head_width * head.shape.compute_bytes)


def _mask_bytes(shape: ModelQuery) -> int:
    """The mask over documents, where rows hold several."""
    return shape.sequences * shape.tokens**2 * shape.compute_bytes if shape.segments else 0


def _batch_bytes(shape: ModelQuery) -> int:
    """Token ids and labels of all micro-batches of an update, and their document numbers."""
    each = 8 + 8 + (4 if shape.segments else 0)
    return each * shape.positions * shape.micro_batches


def _work(blocks: list[DecoderBlock], head: Head, recompute: bool) -> list[Work]:
    dtype = "bfloat16" if head.shape.compute_bytes == 2 else "float32"
    forward = head.forward + sum(block.forward for block in blocks)
    backward = head.backward + sum(block.backward for block in blocks)
    if recompute:
        backward += sum(block.again for block in blocks if block.keeps)
    return [
        Work(forward, dtype=dtype, phase="forward"),
        Work(backward, dtype=dtype, phase="backward"),
    ]

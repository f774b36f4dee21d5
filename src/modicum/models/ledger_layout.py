"""The decoder's parts in order, and the tensors that represent its parameters, for its ledger."""

from __future__ import annotations

import math
from dataclasses import replace

from modicum.core.contracts.ledger import ModelQuery
from modicum.core.errors import InputError
from modicum.core.layers.form_layer import StoredRows
from modicum.core.layers.linear_forms import linear_form
from modicum.core.layers.wiring import streams
from modicum.models.config import ModelConfig
from modicum.models.ledger_block import DecoderBlock
from modicum.models.ledger_head import Head
from modicum.models.ledger_parts import AdapterActivations


def held(config: ModelConfig, item_bytes: int) -> dict[str, StoredRows]:
    """Of each parameter in the decoder's file, the tensors that represent it in the decoder.

    Each is given by how many rows it has, by which ranks shard it, and the bytes of a row; those
    that are no codes have `item_bytes` an element.
    """

    def tensors(name: str, shape: tuple[int, ...]) -> StoredRows:
        layer, _, leaf = name.rpartition(".")
        if layer.endswith("_proj") and leaf == "weight":
            planned = config.forms.of(layer)
            form = linear_form(planned.name)
            if not form.trains:
                return form.rows(shape[1], shape[0], item_bytes, **planned.arguments)
        return ((shape[0], math.prod(shape[1:]) * item_bytes),)

    return {name: tensors(name, shape) for name, shape in config.parameter_shapes().items()}


def weight_bytes(config: ModelConfig, item_bytes: int) -> int:
    """Bytes of all weights; those that are no codes have `item_bytes` an element, integers four."""
    floats = sum(rows * each for part in held(config, item_bytes).values() for rows, each in part)
    floats += item_bytes * sum(math.prod(shape) for shape in config.resting_shapes().values())
    return floats + 4 * sum(math.prod(shape) for shape in config.index_shapes().values())


def parts(
    config: ModelConfig, shape: ModelQuery, adapted: AdapterActivations | None
) -> tuple[list[DecoderBlock], Head]:
    """Every block, given whether something before it learns, and the head.

    Raises:
        InputError: weights are to be trained that take no gradients.
    """
    if adapted is None:
        for name in {form.name for form in config.forms.forms()}:
            if not linear_form(name).trains:
                problem = "weights in this form are not trained; add an adapter, or take the form "
                raise InputError(f"{problem}dense", field="linear", value=name)
    starts = adapted is None or "model.embed_tokens" in adapted.sites
    blocks, flows = _blocks(config, shape, adapted, starts)
    return blocks, Head(config, shape, adapted, "lm_head", flows)


def _blocks(
    config: ModelConfig, shape: ModelQuery, adapted: AdapterActivations | None, starts: bool
) -> tuple[list[DecoderBlock], bool]:
    """The blocks, given which streams take a gradient and are new, and whether the last one does.

    Args:
        starts: whether what the first block reads takes a gradient.
    """
    at, takes = streams(config.skips()), 0  # streams are given by the branches that are in them
    read, entered = set[int](), set[int]()
    blocks = []
    for layer in range(config.layers):
        enter, between, leave = at[2 * layer : 2 * layer + 3]
        mixer, mlp = enter[0], between[0]
        block = DecoderBlock(
            config,
            shape,
            adapted,
            f"model.layers.{layer}.",
            starts or bool(mixer & takes),
            layer,
            twin=mixer == mlp,
            entering=len({*enter} - entered),
            held=len({*enter, *between}),
            flowing=max(map(len, (enter, between, leave))),
        )
        takes |= block.mixed << 2 * layer
        block = replace(block, mlp_flows=starts or bool(mlp & takes))
        takes |= block.added << 2 * layer + 1
        norms = {each for each, saves in ((mixer, block.flows), (mlp, block.mlp_flows)) if saves}
        came = len(norms & {*enter})
        blocks.append(replace(block, shared=len(norms & read), saves_entering=came))
        read, entered = read | norms, entered | {*enter}
    return blocks, starts or bool(takes)

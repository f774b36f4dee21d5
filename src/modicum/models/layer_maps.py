"""The maps that the decoder and the classifier give of themselves, by their configurations.

Knows names and shapes, and no module.
"""

from __future__ import annotations

from modicum.core.layers.map import (
    MappedAttention,
    MappedBlock,
    MappedConvolution,
    MappedMlp,
    MappedNorm,
    MappedSlice,
    MappedTable,
    ModelMap,
    RotaryPairs,
    Units,
)
from modicum.models.config import ModelConfig

_STATISTICS = "norms take the mean over all channels"


def llama_map(config: ModelConfig) -> ModelMap:
    """The map of a decoder with dense layers.

    >>> config = ModelConfig(vocabulary_size=11, width=8, layers=1, heads=2)
    >>> llama_map(config).blocks[0].attentions[0].heads.count
    2
    """
    table, tied = "model.embed_tokens.weight", config.tied_embeddings
    head = table if tied else "lm_head.weight"
    blocks = tuple(_block(config, number) for number in range(config.layers))
    kept = f"{table} has another use" if tied else ""
    norm = MappedNorm("model.norm", "rms", "model.norm.weight", None, 0, (head,), kept)
    makers = [MappedSlice(table, 1, 0, (config.width, 1), (1, 0))]
    readers = []
    for block in blocks:
        readers += [_columns(name, config.width) for n in block.norms for name in n.readers]
        output, down = block.attentions[0].output.tensor, block.mlps[0].down.tensor
        makers.append(_rows(f"{block.name}.input_layernorm.weight", config.width))
        makers += _with_bias(output, config.width, config.output_bias)
        makers.append(_rows(f"{block.name}.post_attention_layernorm.weight", config.width))
        makers += _with_bias(down, config.width, config.mlp_bias)
    makers.append(_rows("model.norm.weight", config.width))
    readers.append(_columns(head, config.width))
    stream = Units("stream", "", config.width, tuple(makers), tuple(readers), needed=_STATISTICS)
    return ModelMap(
        config.width,
        stream,
        blocks,
        norms=(norm,),
        tables=(MappedTable(table, "tokens"),),
        head=head,
    )


def _rows(tensor: str, count: int) -> MappedSlice:
    return MappedSlice(tensor, 0, 0, (count, 1), (1 if count > 1 else 0, 0))


def _columns(tensor: str, count: int) -> MappedSlice:
    return MappedSlice(tensor, 1, 0, (count, 1), (1 if count > 1 else 0, 0))


def _with_bias(weight: str, count: int, bias: bool) -> list[MappedSlice]:
    names = [weight, weight.removesuffix("weight") + "bias"]
    return [_rows(name, count) for name in names[: 1 + bias]]


def _block(config: ModelConfig, number: int) -> MappedBlock:
    name = f"model.layers.{number}"
    attention, mlp = _attention(config, number), _mlp(config, number)
    projections = tuple(f"{name}.self_attn.{side}_proj.weight" for side in "qkv")
    ups = (f"{name}.mlp.gate_proj.weight", f"{name}.mlp.up_proj.weight")
    norms = [
        MappedNorm(f"{name}.{leaf}", "rms", f"{name}.{leaf}.weight", None, 0, readers)
        for leaf, readers in (("input_layernorm", projections), ("post_attention_layernorm", ups))
    ]
    return MappedBlock(name, "Block", number, tuple(norms), (attention,), (mlp,))


def _attention(config: ModelConfig, number: int) -> MappedAttention:
    name = f"model.layers.{number}.self_attn"
    count, kv_heads = config.heads_of(number), config.kv_heads_of(number)
    each, width = count // kv_heads, config.head_width

    def grid(side: str, dim: int, per_group: int, leaf: str = "weight") -> MappedSlice:
        steps = (per_group * width, width if per_group > 1 else 0, 1)
        strides = (steps[0] if kv_heads > 1 else 0, *steps[1:])
        return MappedSlice(f"{name}.{side}_proj.{leaf}", dim, 0, (kv_heads, per_group, width),
                           strides)  # fmt: skip

    leaves = ("weight", "bias") if config.attention_bias else ("weight",)
    query, key, value = (
        tuple(grid(side, 0, each if side == "q" else 1, leaf) for leaf in leaves) for side in "qkv"
    )
    output = grid("o", 1, each)
    everything = (*query, *key, *value)
    within = each if 1 < kv_heads < count else count
    only = "each is the only one of its kind there"
    heads = Units("heads", name, count, everything if each == 1 else query, (output,),
                  within, needed=only if within == 1 else "")  # fmt: skip
    groups = Units("groups", name, kv_heads, everything, (output,),
                   needed=only if kv_heads == 1 else "")  # fmt: skip
    return MappedAttention(
        name, width, width, kv_heads, query, key, value, output, RotaryPairs("halves", width),
        None, None, heads, groups,
    )  # fmt: skip


def _mlp(config: ModelConfig, number: int) -> MappedMlp:
    name, inner = f"model.layers.{number}.mlp", config.mlp_width_of(number)
    gate, up = (
        tuple(_with_bias(f"{name}.{side}_proj.weight", inner, config.mlp_bias))
        for side in ("gate", "up")
    )
    down = _columns(f"{name}.down_proj.weight", inner)
    neurons = Units("neurons", name, inner, gate + up, (down,))
    return MappedMlp(name, up, gate, down, neurons, ("silu",))


def convnet_map(widths: tuple[int, ...], groups: int) -> ModelMap:
    """The map of a classifier of convolutions in a row.

    Args:
        widths: channels that each convolution makes.
        groups: of the norm that follows each convolution; 0 where none does.

    >>> [units.count for units in convnet_map((4, 8), groups=2).channels]
    [2, 2]
    """
    blocks, channels, convolutions = [], [], []
    for place, width in enumerate(widths):
        name = f"blocks.{place}"
        count = groups or width
        last = place + 1 == len(widths)
        reader = "head.weight" if last else f"blocks.{place + 1}.conv.weight"
        made = [f"{name}.conv.weight", f"{name}.conv.bias"]
        norm = f"{name}.norm" if groups else None
        made += [f"{norm}.weight", f"{norm}.bias"] if norm else []
        makers = tuple(_runs(tensor, 0, width, count) for tensor in made)
        only = "each is the only one of its kind there" if count == 1 else ""
        readers = (_runs(reader, 1, width, count),)
        units = Units("channels", "", count, makers, readers, needed=only)
        channels.append(units)
        convolutions.append(MappedConvolution(f"{name}.conv", norm, place))
        norms: tuple[MappedNorm, ...] = ()
        if norm:
            norms = (MappedNorm(norm, "group", f"{norm}.weight", f"{norm}.bias",
                                kept="relu uses it too", writer=made[0]),)  # fmt: skip
        blocks.append(MappedBlock(name, "ConvBlock", place, norms, (), ()))
    return ModelMap(0, None, tuple(blocks), channels=tuple(channels),
                    convolutions=tuple(convolutions), head="head.weight")  # fmt: skip


def _runs(tensor: str, dim: int, width: int, count: int) -> MappedSlice:
    """All places of a dimension, in runs where channels are normalised in groups."""
    each = width // count
    if each == 1:
        return MappedSlice(tensor, dim, 0, (width, 1), (1 if width > 1 else 0, 0))
    return MappedSlice(tensor, dim, 0, (count, each, 1), (each, 1, 0))

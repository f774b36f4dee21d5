"""The map of small models of transformers: what it finds, and that it holds in the full model.

Units are exchanged and removed in all layers at once, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers import map as layer_map
from modicum.core.layers import map_check
from modicum.core.layers.block_kinds import outermost_lists
from modicum.core.layers.map import (
    ModelMap,
    Units,
    example_of,
    find_map,
    map_of,
    permute,
    remove,
    silence,
)
from modicum.core.layers.meta import on_meta
from modicum.core.machine.memory import TensorMeter
from modicum.core.random import normal_
from modicum.models import llama
from modicum.models.config import ModelConfig

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "vocab_size": 20,
}  # fmt: skip
NO_MLP = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
GROUPS = {"num_key_value_heads": 2}
OLD: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 20, "n_positions": 8}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}

MIXTURES = ("Mixtral", "Qwen3Moe", "Llama4", "GptOss", "Olmoe", "Dots1")


class Case(NamedTuple):
    """A class of transformers and its sizes, and what is to be found."""

    kind: str
    sizes: dict[str, Any]
    kv_heads: int = 2
    neurons: int = 24
    rotary: tuple[str, int] | None = ("halves", 4)
    query: tuple[str, int, tuple[int, ...]] = ("q_proj.weight", 0, (8, 4, 1))
    unknown: tuple[str, ...] = ()
    stream: bool = True


CASES = {
    "llama": Case("LlamaForCausalLM", SIZES | GROUPS | {"tie_word_embeddings": True}),
    "mistral": Case(
        "MistralForCausalLM", SIZES | GROUPS | {"head_dim": 8}, rotary=("halves", 8),
        query=("q_proj.weight", 0, (16, 8, 1)),
    ),
    "qwen2": Case("Qwen2ForCausalLM", SIZES | GROUPS),
    "qwen3": Case("Qwen3ForCausalLM", SIZES | GROUPS | {"head_dim": 4}),
    "gemma2": Case("Gemma2ForCausalLM", SIZES | GROUPS | {"head_dim": 4}),
    "gemma3": Case("Gemma3ForCausalLM", SIZES | GROUPS | {"head_dim": 4}),
    "olmo2": Case("Olmo2ForCausalLM", SIZES | GROUPS),
    "gpt2": Case(
        "GPT2LMHeadModel", OLD, 4, 64, None, ("c_attn.weight", 1, (4, 0, 1)),
    ),
    "gpt_neox": Case(
        "GPTNeoXForCausalLM", SIZES | {"rotary_pct": 0.5}, 4, 24, ("halves", 2),
        ("query_key_value.weight", 0, (12, 0, 1)),
    ),
    "gptj": Case(
        "GPTJForCausalLM", OLD | {"rotary_dim": 4}, 4, 64, ("neighbours", 4),
        ("q_proj.weight", 0, (4, 0, 1)),
    ),
    "phi3": Case(
        "Phi3ForCausalLM", SIZES | GROUPS, query=("qkv_proj.weight", 0, (8, 4, 1)),
    ),
    "opt": Case(
        "OPTForCausalLM",
        NO_MLP | {"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 8},
        4, 24, None, ("q_proj.weight", 0, (4, 0, 1)),
    ),
    "bert": Case(
        "BertForMaskedLM", SIZES, 4, 24, None, ("self.query.weight", 0, (4, 0, 1)),
        ("cls.predictions.transform.dense",),
    ),
    "vit": Case(
        "ViTForImageClassification",
        {k: v for k, v in SIZES.items() if k != "vocab_size"} | {"image_size": 8, "patch_size": 4},
        4, 24, None, ("q_proj.weight", 0, (4, 0, 1)),
    ),
    "falcon": Case(
        "FalconForCausalLM", NO_MLP | {"alibi": False}, 1, 64,
        query=("query_key_value.weight", 0, (0, 4, 1)),
    ),
    "falcon_groups": Case(
        "FalconForCausalLM",
        NO_MLP | {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}, 2, 64,
        query=("query_key_value.weight", 0, (16, 4, 1)),
    ),
    "bloom": Case(
        "BloomForCausalLM", {"hidden_size": 16, "n_layer": 2, "n_head": 4, "vocab_size": 20}, 4,
        64, None, ("query_key_value.weight", 0, (12, 0, 1)),
    ),
    "mixtral": Case(
        "MixtralForCausalLM", SIZES | GROUPS | {"num_local_experts": 3},
    ),
    "qwen3_moe": Case(
        "Qwen3MoeForCausalLM",
        SIZES | GROUPS | {"head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
                          "moe_intermediate_size": 24},
    ),
    "olmoe": Case(
        "OlmoeForCausalLM", SIZES | GROUPS | {"num_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama4": Case(
        "Llama4ForCausalLM",
        SIZES | GROUPS | {"head_dim": 4, "num_local_experts": 3, "intermediate_size_mlp": 24},
        rotary=("neighbours", 4),
    ),
}  # fmt: skip


def made(kind: str, sizes: dict[str, Any]) -> nn.Module:
    """A small model in float64 with weights that are neither zero nor one."""
    model = getattr(transformers, kind)
    config = model.config_class
    if kind == "Gemma3ForCausalLM":
        config = transformers.Gemma3TextConfig
    if kind == "Llama4ForCausalLM":
        config = transformers.Llama4TextConfig
    tokens = {} if "ViT" in kind or "ResNet" in kind else TOKENS
    found: nn.Module = model(config(**sizes | tokens)).eval().double()
    for name, parameter in found.named_parameters():
        change = normal_(torch.empty_like(parameter), seed=0, name=name, std=0.1)
        with torch.no_grad():
            parameter += change
    if kind.startswith(MIXTURES):
        # The grouped kernel, which is the default, has no float64.
        found.set_experts_implementation("eager")  # type: ignore[operator]
    return found


@torch.no_grad()
def output(model: nn.Module) -> Tensor:
    example = example_of(model)
    if "pixel_values" in example:
        shape = example["pixel_values"].shape
        images = normal_(torch.empty(shape, dtype=torch.float64), seed=0, name="x", std=1.0)
        example = {"pixel_values": images}
    logits: Tensor = model(**example).logits
    return logits


def order_of(units: Units) -> list[int]:
    """A random order within runs."""
    generator = torch.Generator().manual_seed(units.count)
    runs = range(0, units.count, units.within)
    order = torch.cat([torch.randperm(units.within, generator=generator) + run for run in runs])
    found: list[int] = order.tolist()
    return found


def some_of(units: Units) -> list[int]:
    """One of each run, or two of many."""
    runs = range(0, units.count, units.within)
    return [run + place for run in runs for place in ((1, 3) if units.within > 8 else (1,))]


def check(model: nn.Module, parts: Sequence[Units]) -> None:
    """Exchanging all of them at once changes nothing; removing is as silencing, which does."""
    before = output(model)
    movable = [units for units in parts if not units.order_matters]
    changed = copy.deepcopy(model)
    for units in movable:
        permute(changed, units, order_of(units))
    if any(units.within > 1 for units in movable):
        pairs = zip(model.parameters(), changed.parameters(), strict=True)
        assert not all(torch.equal(one, other) for one, other in pairs)
    torch.testing.assert_close(output(changed), before, rtol=0, atol=1e-6)
    removable = [units for units in parts if not units.needed]
    smaller, zeroed = copy.deepcopy(model), copy.deepcopy(model)
    for units in removable:
        silence(zeroed, units, some_of(units))
        remove(smaller, units, some_of(units))
    if removable:
        assert (output(zeroed) - before).abs().max() > 1e-4
        assert sum(p.numel() for p in smaller.parameters()) < sum(
            p.numel() for p in model.parameters()
        )
    torch.testing.assert_close(output(smaller), output(zeroed), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_heads_groups_neurons_and_stream_move_together(name: str) -> None:
    case = CASES[name]
    model = made(case.kind, case.sizes)
    found = find_map(model)
    assert found.width == 16
    assert len(found.blocks) == 2
    assert sorted(found.unknown) == sorted(case.unknown)
    for block in found.blocks:
        (attention,) = block.attentions
        assert (attention.heads.count, attention.kv_heads) == (4, case.kv_heads)
        assert {mlp.neurons.count for mlp in block.mlps} == {case.neurons}
        rotary = attention.rotary
        assert (None if rotary is None else (rotary.layout, rotary.width)) == case.rotary
        tensor, dim, strides = case.query
        assert attention.query[0].tensor.endswith(tensor)
        assert (attention.query[0].dim, attention.query[0].strides) == (dim, strides)
        ordered = name == "bloom"
        assert bool(attention.heads.order_matters) == ordered
        assert bool(attention.heads.needed) == (name in ("bloom", "olmo2", "olmoe"))
        assert attention.heads.checked
    attentions, mlps = found.all_attentions(), found.all_mlps()
    neurons = [mlp.neurons for mlp in mlps]
    experts = [mlp.stacked for mlp in mlps if mlp.stacked is not None]
    assert len(experts) == sum(mlp.experts > 0 for mlp in mlps)
    check(model, [attention.heads for attention in attentions] + neurons + experts)
    assert found.stream is not None
    check(model, [attention.groups for attention in attentions] + [found.stream])


def long(name: str) -> nn.Module:
    """The model of a case with seven blocks."""
    case = CASES[name]
    blocks = "n_layer" if "n_layer" in case.sizes else "num_hidden_layers"
    return made(case.kind, case.sizes | {blocks: 7})


@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma2", "llama4"])
def test_what_is_carried_from_a_few_blocks_is_found_in_all_of_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = long(name)
    parts, calls = outermost_lists(model), set()
    (blocks,) = parts.values()
    for number, block in enumerate(blocks.children()):
        block.register_forward_pre_hook(lambda module, args, n=number: calls.add(n))
    found = find_map(model)
    assert len(calls) < 7
    for block in blocks.children():
        block._forward_pre_hooks.clear()
    heads = [attention.heads for attention in found.all_attentions()]
    check(model, heads + [mlp.neurons for mlp in found.all_mlps()])
    monkeypatch.setattr(layer_map, "lists_with_neighbours", lambda model: [])
    assert find_map(model) == found


def test_so_it_is_of_an_encoder_whose_output_all_blocks_of_a_decoder_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sides = {"num_layers": 6, "num_decoder_layers": 5, "num_heads": 4, "decoder_start_token_id": 0}
    widths = {"vocab_size": 20, "d_model": 16, "d_kv": 4, "d_ff": 24}
    model = made("T5ForConditionalGeneration", sides | widths)
    found = find_map(model)
    norm = next(n for n in found.norms if n.name == "encoder.final_layer_norm")
    assert len(norm.readers) == 10
    monkeypatch.setattr(layer_map, "lists_with_neighbours", lambda model: [])
    assert find_map(model) == found


@pytest.mark.parametrize("name", ["gpt_neox", "qwen3_moe"])
def test_a_model_without_memory_has_the_same_map(name: str) -> None:
    model = long(name)
    assert find_map(copy.deepcopy(model).to("meta")) == find_map(model)


@pytest.mark.expensive
@pytest.mark.parametrize("kind", ["transformers", "own"])
def test_a_model_of_seven_billion_is_mapped_without_allocating_it(kind: str) -> None:
    with on_meta():
        if kind == "own":
            config = ModelConfig(
                vocabulary_size=32000, width=4096, layers=32, heads=32, mlp_width=11008
            )
            model: nn.Module = llama.Llama(config)
        else:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
    assert sum(p.numel() for p in model.parameters()) > 6.7e9
    with TensorMeter("cpu") as meter:
        found = find_map(model)
    assert meter.peak is not None
    assert meter.peak < 1 << 30
    assert found.unknown == {}
    assert len(found.blocks) == 32
    assert all(a.heads.checked and a.groups.checked for a in found.all_attentions())
    assert all(m.neurons.checked for m in found.all_mlps())
    assert found.stream is not None
    assert len(found.stream.makers) == 130
    if kind == "own":
        assert found == map_of(model)


def mapped(kind: str, **sizes: Any) -> ModelMap:
    return find_map(made(kind, sizes))


def test_norms_of_heads_and_scales_with_an_offset_are_found() -> None:
    qwen = mapped("Qwen3ForCausalLM", **CASES["qwen3"].sizes)
    (attention,) = qwen.blocks[1].attentions
    assert attention.query_norm == "model.layers.1.self_attn.q_norm"
    assert attention.key_norm == "model.layers.1.self_attn.k_norm"
    gemma = mapped("Gemma2ForCausalLM", **CASES["gemma2"].sizes)
    first, after = gemma.blocks[0].norms[:2]
    assert (first.kind, first.offset, len(first.readers), first.kept) == ("rms", 1, 3, "")
    assert (after.readers, after.kept) == ((), "add uses it too")
    bert = mapped("BertForMaskedLM", **SIZES)
    assert [norm.kept for norm in bert.blocks[0].norms] == ["add uses it too"] * 2


def test_tied_tensors_and_tables_are_found() -> None:
    found = mapped("GPT2LMHeadModel", **OLD)
    tokens, positions = found.tables
    assert tokens.ties == ("transformer.wte.weight", "lm_head.weight")
    assert (tokens.role, positions.role) == ("tokens", "other")
    assert found.head == "transformer.wte.weight"
    assert found.norms[-1].kept == "transformer.wte.weight has another use"
    untied = mapped("GPT2LMHeadModel", **OLD, tie_word_embeddings=False)
    assert (untied.ties, untied.head, untied.norms[-1].kept) == ((), "lm_head.weight", "")


def test_fused_gates_and_experts_are_found() -> None:
    (mlp,) = mapped("Phi3ForCausalLM", **CASES["phi3"].sizes).blocks[0].mlps
    assert (mlp.gate[0].start, mlp.up[0].start, mlp.activation) == (0, 24, ("silu",))
    (experts,) = mapped("MixtralForCausalLM", **CASES["mixtral"].sizes).blocks[0].mlps
    assert experts.experts == 3
    assert (experts.up[0].tensor, experts.up[0].dim) == (
        "model.layers.0.mlp.experts.gate_up_proj", 1,
    )  # fmt: skip
    assert experts.down.dim == 2


def test_experts_that_are_routed_in_groups_are_named_and_left_alone() -> None:
    sizes = SIZES | GROUPS | {
        "head_dim": 4, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 0,
        "n_shared_experts": 1,
    }  # fmt: skip
    model = made("Dots1ForCausalLM", sizes)
    found = find_map(model)
    for layer in (0, 1):
        problem = found.unknown[f"experts of model.layers.{layer}.mlp.experts"]
        assert "exchanging its units changed" in problem
    assert all(mlp.stacked is None for mlp in found.all_mlps())
    neurons = [mlp.neurons for mlp in found.all_mlps()]
    assert max(mlp.experts for mlp in found.all_mlps()) == 8
    check(model, [attention.groups for attention in found.all_attentions()] + neurons)


def test_experts_move_with_their_routers_rows_and_cannot_be_removed() -> None:
    model = made("MixtralForCausalLM", CASES["mixtral"].sizes)
    units = find_map(model).blocks[0].mlps[0].stacked
    assert units is not None
    assert units.checked
    moved = {piece.tensor.removeprefix("model.layers.0.mlp.") for piece in units.slices}
    assert moved == {"experts.gate_up_proj", "experts.down_proj", "gate.weight"}
    before = output(model)
    with pytest.raises(InputError, match="give its tokens to other experts"):
        remove(model, units, [0])
    permute(model, units, [2, 0, 1])
    torch.testing.assert_close(output(model), before, rtol=0, atol=1e-6)
    silence(model, units, [0, 1, 2])
    assert (output(model) - before).abs().max() > 1e-4


def test_a_part_that_is_too_large_to_be_tried_is_named_and_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(map_check, "_LARGEST_PART", 3000)
    found = mapped("MixtralForCausalLM", **CASES["mixtral"].sizes)
    assert not found.all_mlps()
    assert all(attention.heads.checked for attention in found.all_attentions())
    assert "too large" in found.unknown["model.layers.1.mlp.experts"]
    # How the experts lie in their tensors is not known, and they read the stream.
    assert found.stream is None


@pytest.mark.expensive
def test_experts_whose_gates_lie_between_are_found() -> None:
    sizes = SIZES | GROUPS | {"head_dim": 4, "num_local_experts": 4}
    found = mapped("GptOssForCausalLM", **sizes)
    (mlp,) = found.blocks[0].mlps
    assert [(piece.start, piece.strides) for piece in mlp.gate] == [(0, (2, 0)), (0, (2, 0))]
    # Each head has a sink of its own, which the slices do not name.
    assert found.blocks[0].attentions[0].heads.order_matters
    assert "sinks" in found.unknown["model.layers.0.self_attn"]


@pytest.mark.parametrize("layer_type", ["basic", "bottleneck"])
def test_channels_of_residual_convolutions_move_together(layer_type: str) -> None:
    sizes = {"embedding_size": 4, "hidden_sizes": [8, 12], "depths": [1, 2], "num_labels": 5}
    model = made("ResNetForImageClassification", sizes | {"layer_type": layer_type})
    model.config.image_size = 32  # type: ignore[union-attr]
    found = find_map(model)
    assert found.unknown == {}
    shared = max(found.channels, key=lambda units: len(units.makers))
    # The shortcut and the last convolution of each of the stage's two blocks.
    assert sum("convolution.weight" in piece.tensor for piece in shared.makers) == 3
    assert all(convolution.channels is not None for convolution in found.convolutions)
    inner = found.all_norms()[0]
    assert (inner.kind, inner.writer) == ("batch", f"{inner.name[:-13]}convolution.weight")
    check(model, found.channels)


def test_a_mixer_that_is_not_known_is_named_and_left_alone() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20, "state_size": 4}
    found = mapped("MambaForCausalLM", **sizes)
    assert not found.all_attentions()
    assert "backbone.layers.0.mixer.in_proj" in found.unknown
    assert found.unknown["backbone.layers.0.mixer"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_followed_through_the_grouped_kernel(dtype: torch.dtype) -> None:
    """Which is the default, where widths are multiples of sixteen bytes."""
    sizes = SIZES | GROUPS | {"num_local_experts": 4, "hidden_size": 32, "intermediate_size": 64}
    with on_meta(dtype):
        grouped = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **TOKENS))
    found = find_map(grouped)
    grouped.set_experts_implementation("eager")
    wanted = find_map(grouped)
    assert len(found.blocks) == 2
    assert found.attentions == wanted.attentions
    assert [block.attentions for block in found.blocks] == [
        block.attentions for block in wanted.blocks
    ]

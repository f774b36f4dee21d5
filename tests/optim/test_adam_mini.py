"""Adam-mini: the equations of its authors by block, and half of the state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from modicum.adapters.head_blocks import note_fused_heads
from modicum.core.contracts.ledger import OptimizerQuery
from modicum.core.contracts.parameters import attention_heads, optimizer_groups, trained_shapes
from modicum.core.layers.meta import on_meta
from modicum.core.machine.memory import bytes_by_kind
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.models import ModelConfig, create
from modicum.optim import AdamMini, AdamW
from modicum.proofs.contracts.optim.subjects import numbers

CONFIG = ModelConfig(
    vocabulary_size=29, width=24, layers=2, heads=6, kv_heads=2, mlp_width=31, context=8
)


def blocks_of(name: str, shape: torch.Size) -> int:
    """How many the paper has."""
    if "q_proj" in name:
        return CONFIG.heads
    if "k_proj" in name:
        return CONFIG.kv_heads or CONFIG.heads
    return shape[0] if len(shape) > 1 else 1


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str
)
def test_twenty_steps_are_the_authors_and_second_moments_are_blocks(
    dtype: torch.dtype, near: float
) -> None:
    rate, (b1, b2), epsilon, decay = 0.01, (0.9, 0.95), 1e-6, 0.3
    model = create(CONFIG, seed=0).to(dtype)
    groups = optimizer_groups(model, learning_rate=rate, weight_decay=decay)
    optimizer = AdamMini(groups, betas=(b1, b2), epsilon=epsilon)
    weights = dict(model.named_parameters())
    expected = {name: p.detach().clone().double() for name, p in weights.items()}
    moments: dict[str, tuple[Tensor, Tensor]] = {
        name: (torch.zeros_like(w), torch.zeros(blocks_of(name, w.shape), 1).double())
        for name, w in expected.items()
    }
    for step in range(1, 21):
        for name, parameter in weights.items():
            gradient = numbers(*parameter.shape, name=f"{name} {step}").to(dtype)
            parameter.grad = gradient.clone()
            mean, square = moments[name]
            wide = gradient.double()
            mean = b1 * mean + (1 - b1) * wide
            each = wide.reshape(len(square), -1).square().mean(1, keepdim=True)
            square = b2 * square + (1 - b2) * each
            moments[name] = mean, square
            root = square.sqrt() / (1 - b2**step) ** 0.5 + epsilon
            update = (mean.reshape(len(square), -1) / (1 - b1**step) / root).view(wide.shape)
            shrunk = expected[name] * (1 - rate * decay * (wide.ndim > 1))
            expected[name] = shrunk - rate * update
        optimizer.step()
    for name, parameter in weights.items():
        assert (parameter.double() - expected[name]).abs().max() < near, name
        kept = optimizer.state[parameter]["exp_avg_sq"]
        assert kept.numel() == blocks_of(name, parameter.shape), name


def test_heads_are_those_of_queries_and_keys() -> None:
    found = attention_heads(create(CONFIG, seed=0))
    assert sorted(found.values()) == [2, 2, 6, 6]
    assert all("q_proj.weight" in name or "k_proj.weight" in name for name in found)
    assert attention_heads(nn.Linear(4, 4)) == {}


def test_heads_of_a_model_of_transformers_are_known() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    found = attention_heads(transformers.LlamaForCausalLM(config))
    prefix = "model.layers.0.self_attn"
    assert found == {f"{prefix}.q_proj.weight": 4, f"{prefix}.k_proj.weight": 2}


def fused_models() -> dict[str, Any]:
    """Three that fuse queries, keys and values each in another way, with four heads of width 4."""
    transformers = pytest.importorskip("transformers")
    alike = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    small = {**alike, "intermediate_size": 24, "max_position_embeddings": 8}
    phi3 = {"num_key_value_heads": 2, "pad_token_id": 0}
    gpt2 = transformers.GPT2Config(vocab_size=11, n_embd=16, n_layer=2, n_head=4, n_positions=8)
    return {
        "gpt2": transformers.GPT2LMHeadModel(gpt2),
        "phi3": transformers.Phi3ForCausalLM(transformers.Phi3Config(**small, **phi3)),
        "neox": transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**small)),
    }


# Counted by hand: of heads of width 4 the queries and the keys, and each output of the values.
FUSED = {
    # 4 heads' queries, 4 heads' keys, 16 values, along the columns of W^T.
    "gpt2": ("transformer.h.1.attn.c_attn.weight", (1, 8, 4, 16, 1), 24),
    # 4 heads' queries, 2 heads' keys, 8 values.
    "phi3": ("model.layers.1.self_attn.qkv_proj.weight", (0, 6, 4, 8, 1), 14),
    # Of each head queries, keys, 4 values.
    "neox": (
        "gpt_neox.layers.1.attention.query_key_value.weight",
        (0, *(2, 4, 4, 1) * 4),
        4 * 6,
    ),
}


@pytest.mark.parametrize("kind", FUSED)
def test_heads_in_fused_layers_are_blocks_counted_by_hand(kind: str) -> None:
    name, blocks, count = FUSED[kind]
    model = fused_models()[kind]
    assert name not in attention_heads(model)
    noted = note_fused_heads(model)
    assert noted[name] == blocks == attention_heads(model)[name]
    with on_meta():  # as a plan asks
        assert note_fused_heads(type(model)(model.config)) == noted
    others = {n: b for n, b in noted.items() if b[0] == 0 and b != blocks}
    assert others == {}, "layers that are not fused need no blocks"
    optimizer = AdamMini(optimizer_groups(model, learning_rate=0.01, weight_decay=0.0))
    at = OptimizerQuery(trained_shapes(model))
    weight = model.get_parameter(name)
    before = weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = numbers(*parameter.shape, name="first")
    gradient = weight.grad.clone()
    optimizer.step()
    sizes = [size for n, size in zip(blocks[1::2], blocks[2::2], strict=True) for _ in range(n)]
    assert optimizer.state[weight]["exp_avg_sq"].shape == (count,) == (len(sizes),)
    # After one step the moments are the gradient, and the mean square of its block.
    for part, old, new in zip(
        *(each.split(sizes, blocks[0]) for each in (gradient, before, weight.detach())), strict=True
    ):
        expected = old - 0.01 * part / (part.square().mean().sqrt() + 1e-8)
        torch.testing.assert_close(new, expected, rtol=1e-5, atol=1e-6)
    kept = bytes_by_kind(model, optimizer)["optimizer"]
    assert kept == AdamMini.value().ledger(at).bytes("optimizer")


def of_fused(ranks: Ranks, shards: bool) -> dict[str, Any]:
    """Weights after four steps, with rows on one rank or on all."""
    weights = {"down": (0, 3, 4, 2, 1), "across": (1, 2, 3, 4, 1)}
    shapes = {"down": (14, 5), "across": (6, 10)}
    found = {}
    for name, blocks in weights.items():
        full = numbers(*shapes[name], name=name)
        given: Any = full
        if shards:
            mesh = init_device_mesh("cpu", (ranks.size,))
            given = distribute_tensor(full, mesh, [Shard(0)])
        weight = nn.Parameter(given)
        groups = {"params": [weight], "names": [name], "classes": ["matrix"], "heads": [blocks]}
        optimizer = AdamMini([groups], lr=0.01)
        for step in range(4):
            gradient: Any = numbers(*shapes[name], name=f"{name} {step}")
            if shards:
                gradient = distribute_tensor(gradient, mesh, [Shard(0)])
            weight.grad = gradient
            optimizer.step()
        found[name] = whole(weight.detach()).clone()
    return found


@pytest.mark.ranks
def test_blocks_of_fused_layers_are_the_same_on_three_ranks(pool: Pool) -> None:
    alone = of_fused(Ranks(), False)
    for found in pool.run(of_fused, True, ranks=3):
        for name, weight in alone.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7)


def one_element(ranks: Ranks) -> Tensor:
    """A vector of one element after two steps; of several ranks one holds it."""
    mesh = None if ranks.alone else init_device_mesh("cpu", (ranks.size,))

    def laid_out(tensor: Tensor) -> Tensor:
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])

    weight = nn.Parameter(laid_out(numbers(1)))
    optimizer = AdamMini([weight], lr=0.1)
    for step in range(2):
        weight.grad = laid_out(numbers(1, name=f"{step}"))
        optimizer.step()
    return whole(weight.detach()).clone()


@pytest.mark.ranks
def test_a_vector_of_one_element_is_trained_by_the_rank_that_has_it(pool: Pool) -> None:
    alone = one_element(Ranks())
    assert not torch.equal(alone, numbers(1))
    for found in pool.run(one_element):
        torch.testing.assert_close(found, alone)


def test_vectors_may_follow_adamw() -> None:
    ours, theirs = (nn.Parameter(numbers(9)) for _ in range(2))
    fields = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.3}
    pair = AdamMini([ours], norms_by_adamw=True, **fields), torch.optim.AdamW([theirs], **fields)
    for step in range(20):
        for weight, optimizer in zip((ours, theirs), pair, strict=True):
            weight.grad = numbers(9, name=f"{step}")
            optimizer.step()
    assert (ours - theirs).abs().max() < 1e-6


def test_state_is_half_of_adamws_and_the_plan_says_by_what_rule() -> None:
    model = create(ModelConfig(vocabulary_size=96, width=128, layers=1, heads=4), seed=0)
    at = OptimizerQuery(trained_shapes(model))
    kept = AdamMini.value().ledger(at).bytes("optimizer")
    assert 0.5 < kept / AdamW.value().ledger(at).bytes("optimizer") < 0.51
    treated = {(row.parameter_class, row.rule): row for row in AdamMini.value().treats(at)}
    assert treated["matrix", "BlockAdam"].parameters == 2
    assert treated["vector", "BlockAdam"].bytes == 3 * (4 + 4 * 128 + 4)
    assert sum(row.bytes for row in treated.values()) == kept

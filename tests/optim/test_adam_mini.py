"""Adam-mini: the equations of its authors by block, and half of the state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modicum.core.contracts.ledger import OptimizerQuery
from modicum.core.contracts.parameters import attention_heads, optimizer_groups, trained_shapes
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

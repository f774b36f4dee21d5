"""Compacter's own promises: its sums of Kronecker products, its shared factors, its places."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from modicum.adapters import Compacter
from modicum.adapters.base import SharedFactors
from modicum.adapters.blocks import branch_sites
from modicum.adapters.compacter import CompacterLayer
from modicum.adapters.sites import Site
from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.errors import InputError
from modicum.proofs.contracts.adapters.subjects import llama, numbers, stir, tokens


def layer(method: Compacter, width: int = 24) -> CompacterLayer:
    """A layer with numbers in fp64."""
    site = Site("block", "block", width, width, dtype=torch.float64)
    made = CompacterLayer(method, site, SharedFactors(method, [site]))
    for name, tensor in (*made.named_parameters(), *made.shared.named_parameters()):
        tensor.data = numbers(*tensor.shape, name=name, dtype=torch.float64)
    return made


def built(made: CompacterLayer, which: str) -> Tensor:
    """H [k, o] by its definition: the sum of kron(A_i, s_i t_i)."""
    slow, rank = made.shared.get_parameter("A"), made.method.phm_rank
    s, t = (made.get_parameter(f"{which}_{name}") for name in "st")
    fast = [s[i * rank :][:rank].T @ t[i * rank :][:rank] for i in range(len(slow))]
    return torch.stack([torch.kron(a, b) for a, b in zip(slow, fast, strict=True)]).sum(0)


@pytest.mark.parametrize(("parts", "rank"), [(1, 1), (2, 1), (2, 3), (4, 1), (4, 2)])
def test_in_parts_it_is_the_matrix_that_is_built(parts: int, rank: int) -> None:
    made = layer(Compacter(reduction_factor=3, phm_dim=parts, phm_rank=rank))
    inputs, thin = (numbers(5, 3, width, dtype=torch.float64) for width in (24, 8))
    for which, x, found in (("down", inputs, made.down(inputs)), ("up", thin, made.up(thin))):
        h = built(made, which)
        expected = x @ h + made.get_parameter(f"{which}_bias")
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert torch.linalg.matrix_rank(h) <= parts**2 * rank


def test_the_shared_factors_are_there_once_and_every_layer_uses_them(tmp_path: Path) -> None:
    model, ids = llama(), tokens()
    adapter = stir(Compacter(reduction_factor=2, phm_dim=2).attach(model))
    named = dict(adapter.named_parameters())
    assert [name for name in named if name.endswith(".A")] == ["shared.A"]
    own = sum(2 * (16 + 8) + 8 + 16 for _ in adapter.sites)
    assert sum(value.numel() for value in named.values()) == own + 8
    groups = optimizer_groups(model, learning_rate=1e-3, weight_decay=0.0)
    assert sum(value.numel() for group in groups for value in group["params"]) == own + 8
    adapter.save(tmp_path, form="modicum")
    stored = load_file(tmp_path / "adapter.safetensors")
    assert [name for name in stored if name.endswith(".A")] == ["shared.A"]
    assert sum(value.numel() for value in stored.values()) == own + 8
    shared = named["shared.A"]
    model(ids).square().sum().backward()
    total = torch.zeros_like(shared)
    for _, each in adapter.layers():
        alone = copy.deepcopy(adapter.shared)
        alone.get_parameter("A").grad = None
        before, each._shared = each._shared, (alone,)
        model.zero_grad()
        model(ids).square().sum().backward()
        total += alone.get_parameter("A").grad
        each._shared = before
    model.zero_grad()
    model(ids).square().sum().backward()
    torch.testing.assert_close(shared.grad, total, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        shared.zero_()
        for name, value in named.items():
            if name.endswith("up_bias"):
                value.zero_()
    assert torch.equal(model(ids), llama()(ids))


@pytest.mark.parametrize(
    ("targets", "sites", "trained", "share"),
    [
        (("DenseReluDense",), 24, 104_704, 0.047),
        (("SelfAttention", "DenseReluDense"), 48, 161_728, 0.0726),
    ],
)
def test_numbers_on_the_shape_of_t5_base_are_the_published_ones(
    targets: tuple[str, ...], sites: int, trained: int, share: float
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=768, d_ff=3072, d_kv=64, num_layers=12, num_heads=12, vocab_size=32128
    )
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    adapter = Compacter(targets=targets, also=("*layer_norm*",)).attach(model)
    assert len(adapter.sites) == sites
    found = sum(parameter.numel() for parameter in adapter.parameters())
    assert found == trained
    assert 100 * found / total == pytest.approx(share, abs=5e-4)


def test_in_fp16_small_products_are_not_lost() -> None:
    model, ids = llama().half(), tokens()
    adapter = Compacter(reduction_factor=2, phm_dim=2).attach(model)
    model(ids).float().square().sum().backward()
    grads = [value.grad for name, value in adapter.named_parameters() if name.endswith("_s")]
    assert all(bool(grad.isfinite().all()) and bool(grad.any()) for grad in grads)


class Norms(nn.Module):
    """A block whose modules norm their own output, as BERT's do."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))


def test_where_branches_end_is_known_or_refused() -> None:
    names = [f"model.layers.{n}.{part}" for n in range(2) for part in ("self_attn", "mlp")]
    assert [site.name for site in branch_sites(llama())] == names
    model = nn.ModuleList([Norms(), Norms()])
    with pytest.raises(InputError, match=r"0\.output\.0 is in no module that surely ends"):
        Compacter(reduction_factor=2, phm_dim=2).attach(model)
    assert len(Compacter(targets=("output",), reduction_factor=2, phm_dim=2).sites(model)) == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"reduction_factor": 3}, "reduction_factor: does not divide"),
        ({"reduction_factor": 8, "phm_dim": 4}, "phm_dim: does not divide the bottleneck"),
    ],
)
def test_widths_that_the_parts_do_not_divide(fields: dict[str, int], said: str) -> None:
    model = llama()
    with pytest.raises(InputError, match=said):
        Compacter(**fields).attach(model)
    assert not any("layers_by_adapter" in name for name, _ in model.named_modules())

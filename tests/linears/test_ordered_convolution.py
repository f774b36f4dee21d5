"""Ordered factors of convolutions, and statistics of batch norms for smaller models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.dense_layers import all_convolutions
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.formed_model import FormedModel
from modicum.core.layers.layer_sites import survey
from modicum.core.layers.linear_forms import full_weight
from modicum.linears import LowRank, Maestro, OrderedConv2d, OrderedSteps, reestimate_batch_norms
from modicum.linears.base import LinearMethod

HOW: list[dict[str, Any]] = [
    {"kernel_size": 3},
    {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)},
    {"kernel_size": 3, "dilation": 2, "padding": 2, "bias": False},
    {"kernel_size": (1, 5), "padding": "same"},
    {"kernel_size": 1, "stride": 2},
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def convolution(**how: Any) -> nn.Conv2d:
    made = nn.Conv2d(3, 5, **how).double()
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=number))
    return made


@pytest.mark.parametrize("how", HOW, ids=str)
def test_at_full_width_it_is_the_convolution_and_a_prefix_the_masked_product(
    how: dict[str, Any],
) -> None:
    dense, x = convolution(**how), normal(2, 3, 7, 6, seed=9)
    rank = min(5, dense.weight[0].numel())
    layer = OrderedConv2d.of(dense, rank=rank)
    assert torch.allclose(layer(x), dense(x), atol=1e-10)
    assert torch.allclose(full_weight(layer).view_as(dense.weight), dense.weight, atol=1e-10)
    for width in range(1, rank + 1):
        layer.width = width
        masked = layer.up[:width].mT @ layer.down[:width]
        with torch.no_grad():
            twin = convolution(**how)
            twin.weight.copy_(masked.view_as(twin.weight))
        assert torch.allclose(layer(x), twin(x), atol=1e-10)


@pytest.mark.parametrize("bias", [True, False])
def test_without_components_it_is_the_bias_at_each_place(bias: bool) -> None:
    dense = convolution(kernel_size=3, stride=2, padding=1, bias=bias)
    layer, x = OrderedConv2d.of(dense, rank=5), normal(2, 3, 7, 6).requires_grad_()
    layer.kept = 0
    out = layer(x)
    offset = torch.zeros(5).double() if dense.bias is None else dense.bias
    assert torch.equal(out, offset[:, None, None].expand(2, 5, 4, 3))
    out.sum().backward()
    for parameter in (x, layer.down, layer.up):
        assert parameter.grad is not None
        assert not parameter.grad.any()


class Classifier(nn.Module):
    """Two convolutions with batch norms, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv, self.other = nn.Conv2d(8, 12, 3, stride=2), nn.BatchNorm2d(12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images [n, 1, 8, 8]."""
        x = F.relu(self.norm(self.first(x)))
        return self.head(F.relu(self.other(self.conv(x))).mean((2, 3)))


def classifier(**fields: Any) -> tuple[Classifier, Any, OrderedSteps]:
    torch.manual_seed(0)
    model = Classifier()
    value = Maestro(targets=("conv", "head"), **fields)
    formed = value.convert(model)
    return model, formed, value.steps(model)


def test_a_model_converts_trains_shrinks_and_merges() -> None:
    torch.manual_seed(0)
    plain = Classifier().eval()
    model, formed, steps = classifier(penalty=0.05, threshold=0.3, every=5)
    x = normal(32, 1, 8, 8).float()
    assert torch.allclose(model.eval()(x), plain(x), atol=1e-5)
    assert type(model.first) is nn.Conv2d
    assert isinstance(model.conv, OrderedConv2d)
    assert {name: layer.rank for name, layer in steps.layers.items()} == {"conv": 12, "head": 4}
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=0.01)
    seen = set()
    for _ in range(20):
        seen.add(model.conv.width)
        F.cross_entropy(model(x), x.mean((1, 2, 3)).gt(0).long()).backward()
        steps.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.update()
    assert len(seen) > 5
    steps.close()
    masked = model.eval()(x)
    assert 0 < model.conv.kept < 12
    steps.shrink(optimizer)
    assert model.conv.rank == model.conv.kept
    assert model.conv.down.shape == (model.conv.rank, 72)
    assert torch.equal(model(x), masked)
    state = formed.state_dict()
    formed.merge()
    assert type(model.conv) is nn.Conv2d
    assert torch.allclose(model(x), masked, atol=1e-5)
    assert {name for name in state if name.startswith("conv.")} == {
        "conv.down", "conv.up", "conv.bias",
    }  # fmt: skip


def test_wrapped_without_numbers_it_takes_those_of_another() -> None:
    model, formed, _ = classifier()
    other = Classifier()
    empty = Maestro(targets=("conv", "head")).wrap(other)
    empty.load_state_dict(formed.state_dict())
    x = normal(2, 8, 8, 8).float()
    assert torch.equal(other.eval().conv(x), model.eval().conv(x))


def test_a_compiled_one_computes_the_same() -> None:
    layer = OrderedConv2d.of(convolution(kernel_size=3, padding=1), rank=4)
    x = normal(2, 3, 5, 5)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for width in (None, 2):
        layer.width = width
        assert torch.allclose(compiled(x), layer(x), atol=1e-12)


def test_a_share_of_the_work_counts_the_places() -> None:
    _, _, steps = classifier()
    places = {"conv": 9}
    dense = {"conv": 9 * 72 * 12, "head": 12 * 4}
    for share in (0.1, 0.5, 0.9):
        steps.keep_share(share, places)
        work = {
            name: places.get(name, 1) * layer.kept * (layer.in_features + layer.out_features)
            for name, layer in steps.layers.items()
        }
        assert sum(work.values()) <= share * sum(dense.values())
        assert bool(steps.layers["conv"].kept) == (share > 0.1)
    with pytest.raises(InputError, match="no ordered layer"):
        steps.keep_share(0.5, {"first": 3})


def test_what_holds_no_convolutions_says_so() -> None:
    with pytest.raises(InputError, match="it is a Conv2d"):
        LowRank(targets=("conv",)).convert(Classifier())
    with pytest.raises(InputError, match="low_rank holds linear layers alone"):
        FormedModel(Classifier(), FormPlan().with_form("conv", "low_rank", rank=2))
    grouped = nn.ModuleDict({"conv": nn.Conv2d(4, 4, 3, groups=2), "head": nn.Linear(4, 4)})
    with pytest.raises(InputError, match="or convolution of one group"):
        Maestro(targets=("conv",)).convert(grouped)
    mirrored = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"))
    assert not all_convolutions(mirrored)
    model = Classifier()
    model.tied = nn.Conv2d(8, 12, 3)
    model.tied.weight = model.conv.weight
    with pytest.raises(InputError, match="used by another layer"):
        Maestro(targets=("conv",)).convert(model)
    formed, _, _ = classifier()
    assert "in its own way" in survey(formed).refused["conv"]


def test_the_trait_is_that_of_who_names_a_class() -> None:
    from modicum.core.contracts.catalog import of_package

    holding = []
    for record in of_package("modicum.linears"):
        kind = record.load()
        assert issubclass(kind, LinearMethod)
        assert ("holds_convolutions" in kind.info.traits) == (kind.convolution is not None)
        holding += [record.name] if kind.convolution is not None else []
    assert holding == ["maestro"]


def test_statistics_are_the_means_over_batches_of_the_smaller_model() -> None:
    model, _, steps = classifier()
    batches = [normal(16, 1, 8, 8, seed=seed).float() * (1 + seed) for seed in range(3)]
    for batch in batches:
        model(batch)
    full = model.other.running_mean.clone()
    steps.keep_share(0.3, {"conv": 9})
    steps.before_update(4)
    assert any(layer.width is not None for layer in steps.layers.values())
    model.train()
    assert reestimate_batch_norms(model, iter(batches)) == 2
    assert model.training
    assert model.norm.momentum == 0.1
    inner = [model.eval().first(batch) for batch in batches]
    means = torch.stack([each.mean((0, 2, 3)) for each in inner])
    spread = torch.stack([each.var((0, 2, 3)) for each in inner])
    assert torch.allclose(model.norm.running_mean, means.mean(0), atol=1e-5)
    assert torch.allclose(model.norm.running_var, spread.mean(0), rtol=1e-4)
    assert not torch.allclose(model.other.running_mean, full, atol=1e-3)
    before = model.other.running_mean.clone()
    with pytest.raises(InputError, match="there is none"):
        reestimate_batch_norms(model, [])
    assert torch.equal(model.other.running_mean, before)
    assert reestimate_batch_norms(nn.Linear(2, 2), []) == 0


def test_modes_are_restored_after_an_error() -> None:
    model, _, _ = classifier()

    def fails(model: nn.Module, batch: Tensor) -> None:
        raise RuntimeError("the data ended")

    model.eval()
    with pytest.raises(RuntimeError, match="the data ended"):
        reestimate_batch_norms(model, [torch.ones(2, 1, 8, 8)], fails)
    assert not any(module.training for module in model.modules())
    assert [model.norm.momentum, model.other.momentum] == [0.1, 0.1]

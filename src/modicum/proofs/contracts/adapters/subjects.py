"""What the checks of adapters work on: small models, small values, factors that do something."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.base import Adapter, ReadWeight
from modicum.adapters.blocks import ALL_BRANCHES
from modicum.adapters.lora import LoRA
from modicum.adapters.preparation import PreparationContext, prepared_by
from modicum.core.random import normal_
from modicum.models import ModelConfig, create
from modicum.models.llama import Llama
from modicum.proofs.contracts.base import check

AdapterSubject = type[Adapter] | Adapter

adapters_check = partial(check, "adapters")
LLAMA = ModelConfig(
    vocabulary_size=29, width=16, layers=2, heads=4, kv_heads=2, mlp_width=24, context=32
)


def small(subject: AdapterSubject, **fields: Any) -> Adapter:
    """A value of the method that fits the small models, with `fields` set."""
    if isinstance(subject, Adapter):
        return subject.with_fields(**fields)
    return subject.tiny(**fields)


def attached(
    subject: AdapterSubject,
    model: nn.Module,
    *,
    name: str = "default",
    seed: int = 0,
    weights: ReadWeight | None = None,
    prepared_on: nn.Module | None = None,
    prepared_seed: int | None = None,
    **fields: Any,
) -> AttachedAdapter:
    """The small value on a model, prepared from a few batches that fit it where it asks for data.

    On meta it has what a decoder with numbers gave.

    Args:
        prepared_on: the model that it looks at; None: the one that it comes to.
        prepared_seed: of what it finds out, which a run that resumes keeps; None: `seed`.
    """
    value = small(subject, **fields)
    prepared = None
    if "prepares_from_data" in value.traits:
        full = prepared_on or (llama() if any(p.is_meta for p in model.parameters()) else model)
        context = PreparationContext(full, tuple(value.sites(full)), _batches(full), _loss)
        found_with = seed if prepared_seed is None else prepared_seed
        prepared = prepared_by(value.prepare, replace(context, seed=found_with))
    return value.attach(model, name=name, seed=seed, weights=weights, prepared=prepared)


def another(subject: AdapterSubject, model: nn.Module, name: str) -> AttachedAdapter:
    """A second adapter on a model: of the same method, or LoRA where two of it cannot be."""
    if rewrites(subject):
        return LoRA(rank=2).attach(model, name=name)
    return attached(subject, model, name=name)


def _batches(model: nn.Module) -> list[Tensor]:
    if isinstance(model, nn.Sequential | OddBlocks):
        dtype = next(model.parameters()).dtype
        return [numbers(16, 7, name=f"batch {index}", dtype=dtype) for index in range(2)]
    return [tokens(16), tokens(16, 6)]


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    outputs = model(batch)
    outputs = getattr(outputs, "logits", outputs)
    return outputs.float().square().sum()


def rewrites(subject: AdapterSubject) -> bool:
    """Whether the method puts another weight into the base when it is attached."""
    return "rewrites_base" in subject.info.traits


def dropped(subject: AdapterSubject, dropout: float) -> float:
    """The dropout that a method takes: none where its change is written into the weight."""
    return 0.0 if "writes_base" in subject.info.traits else dropout


def start_tolerance(subject: AdapterSubject) -> float:
    """How far a model may be from what it was before an adapter came that is not used."""
    return 1e-5 if "starts_near" in subject.info.traits else 0.0


class OddBlock(nn.Module):
    """A residual block of an odd width: [..., 7] to [..., 7]."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7, dtype=dtype)
        self.mlp = nn.Sequential(nn.Linear(7, 7, dtype=dtype), nn.Tanh())

    def forward(self, inputs: Tensor) -> Tensor:
        """The inputs, and what the layer adds."""
        output: Tensor = inputs + self.mlp(self.norm(inputs))
        return output


class OddBlocks(nn.Module):
    """Two such blocks, and a layer behind them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock(dtype) for _ in range(2))
        self.narrow = nn.Linear(7, 5, bias=False, dtype=dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [..., 7] to [..., 5]."""
        for block in self.blocks:
            inputs = block(inputs)
        return self.narrow(inputs)


def odd_model(
    subject: AdapterSubject | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Layers whose widths are no power of two, some with a bias: [..., 7] to [..., 5].

    For a method that works after blocks, two blocks before the last layer.
    """
    layers = OrderedDict(
        wide=nn.Linear(7, 13, dtype=dtype),
        bend=nn.Tanh(),
        narrow=nn.Linear(13, 5, bias=False, dtype=dtype),
    )
    after = subject is not None and "after_block" in subject.info.traits
    model: nn.Module = OddBlocks(dtype) if after else nn.Sequential(layers)
    for name, parameter in model.named_parameters():
        normal_(parameter, std=0.4, seed=0, name=name)
    return model


def llama(device: str = "cpu", **fields: Any) -> Llama:
    """modicum's decoder, two blocks of width 16."""
    config = ModelConfig(**(vars(LLAMA) | {"initializer_range": 0.3} | fields))
    if device == "meta":
        with torch.device("meta"):
            return Llama(config)
    return create(config, seed=0)


# How far `llama`'s outputs may be apart where the same sums are made in another order, in fp32: the
# order depends on the processor too, and 2.4e-6 was seen. `distance` says of what.
REORDERED = 1e-5


def some_targets(subject: AdapterSubject) -> tuple[str, ...]:
    """Names of a few of the places in `llama` that a method is on by default."""
    if "after_block" not in subject.info.traits:
        names = {site.suffix for site in small(subject).sites(llama())}
        wanted = ("up_proj", "q_proj")
        return wanted if names.issuperset(wanted) else (min(names),)
    branches = ALL_BRANCHES in small(subject).targets
    return ("layers.1.mlp", "layers.0.self_attn") if branches else ("layers.1",)


def numbers(*shape: int, name: str = "inputs", dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers that depend on the name alone."""
    return normal_(torch.empty(shape, dtype=dtype), seed=0, name=name)


def tokens(rows: int = 3, length: int = 8) -> Tensor:
    """Token ids [rows, length] for `llama`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(LLAMA.vocabulary_size, (rows, length), generator=generator)


def stir(adapter: AttachedAdapter, std: float = 0.2) -> AttachedAdapter:
    """Move every factor off its first value, as training would; the same way every time."""
    with torch.no_grad():
        for name, value in adapter.named_parameters():
            value.add_(numbers(*value.shape, name=f"{adapter.name}/{name}").to(value), alpha=std)
    return adapter


def starts_and_learns(
    subject: AdapterSubject, adapter: AttachedAdapter, inputs: Tensor, before: Tensor
) -> Tensor:
    """Demand the base's outputs of a fresh adapter, and others and gradients of a stirred one.

    Returns:
        The outputs of the stirred one.
    """
    if "starts_elsewhere" not in subject.info.traits:
        tolerance = start_tolerance(subject)
        assert_close(adapter.model(inputs), before, tolerance, "it starts elsewhere")
    stir(adapter)
    adapted: Tensor = adapter.model(inputs)
    assert not torch.equal(adapted, before), "moving the factors changes nothing"
    adapted.square().sum().backward()
    for name, value in adapter.named_parameters():
        assert value.grad is not None, f"{name} gets no gradient"
        assert bool(value.grad.isfinite().all()), f"{name} has a gradient that is not finite"
    return adapted


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest entry of `other` (at least 1)."""
    scale = max(1.0, other.abs().max().item())
    return (one.double() - other.double()).abs().max().item() / scale


def assert_close(one: Tensor, other: Tensor, tolerance: float, what: str) -> None:
    """Demand the same shape, and a relative distance of at most `tolerance`."""
    assert one.shape == other.shape, f"{what}: the shapes are {one.shape} and {other.shape}"
    found = distance(one, other)
    assert found <= tolerance, f"{what}: they differ by {found:.3g}, allowed is {tolerance:.3g}"

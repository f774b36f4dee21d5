"""What an adapter cannot be on a model is one sentence, and the model stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum import adapters
from modicum.adapters.base import Adapter
from modicum.adapters.preparation import Preparation
from modicum.core.contracts.catalog import catalog
from modicum.core.errors import InputError
from modicum.models.llama import Llama
from modicum.proofs.contracts.adapters.subjects import llama, tokens

# Of the decoder's layers the narrowest is 16 x 8, the widest 24 x 16.
ROOMLESS: dict[str, tuple[dict[str, Any], str]] = {
    "lora": ({"rank": 99}, "above the smaller width of .*; the largest rank that fits is 8"),
    "dora": ({"rank": 99}, "above the smaller width"),
    "q_bara": ({"rank": 99}, "above the smaller width"),
    "loram": ({"rank": 99}, "above the smaller width"),
    "diffora": ({"rank": 99}, "above the smaller width"),
    "block_lora": ({"rank": 16, "blocks": 3}, "does not divide rank .*the nearest .* is [24]"),
    "hydra": ({"rank": 2, "sequential_rank": 99}, "sequential_rank: above 16, the smaller width"),
    "pissa": ({"rank": 9}, "above 8, the smaller width of the layer .*k_proj"),
    "lora_fa": ({"rank": 9}, "above 8, the smaller width"),
    "lora_xs": ({"rank": 9}, "above 8, the smaller width"),
    "lora_sb": ({"rank": 9}, "above 8, the smaller width"),
    "svfit": ({"rank": 9}, "above 8, the smaller width"),
    "loldu": ({"rank": 9}, "above 8, the smaller width"),
    "salt": ({"rank": 5}, "above 4, the directions of .*k_proj that `top` leaves"),
    "soka": ({"rank": 99}, "above .*, the Kronecker terms of the layer"),
    "randlora": ({"rank": 9}, "above 8, the smaller width of .*; lower it, which trains more"),
    "shira": ({"rank": 6}, r"k_proj has 128 entries, and 6 asks for 144 of them; at most 5"),
    "s2ft": ({"neurons": 0.001}, "nothing is chosen"),
    "flylora": ({"rank": 4, "active": 5}, "active: above the rank 4"),
    "mos": ({"rank": 3, "shards": 5}, "shards: does not divide .*; the nearest that divides all"),
    "snella": ({"rank": 5}, "heads do not divide it; the next that they do is 6"),
    "compacter": ({"reduction_factor": 3}, "reduction_factor: does not divide .*; the nearest"),
    "mosa": ({"experts": 10**6, "passes": 1}, "experts: more than the 1024 entries"),
}
# Those that look at weights, and at data where they are asked to.
WEIGHED: list[dict[str, Any]] = [
    {"method": "pissa", "rank": 2},
    {"method": "svfit", "rank": 2},
    {"method": "lora_xs", "rank": 2},
    {"method": "loldu"},
    {"method": "salt", "rank": 2},
    {"method": "soka", "rank": 2},
    {"method": "svfit", "rank": None},
    {"method": "soka", "rank": None},
]
PROBING: list[dict[str, Any]] = [
    {"method": "lora_sb", "rank": 2},
    {"method": "shira", "rank": 2, "mask": "gradient"},
    {"method": "shira", "rank": 2, "mask": "snip"},
    {"method": "s2ft", "neurons": 0.3, "selection": "gradient"},
    {"method": "s2ft", "neurons": 0.3, "selection": "activation"},
    {"method": "diffora", "rank": 2, "search_steps": 2},
]


def value_of(method: str, **fields: Any) -> Adapter:
    found = catalog()[method].load()(**fields)
    assert isinstance(found, Adapter)
    return found


def named(fields: dict[str, Any]) -> str:
    return " ".join(str(value) for value in fields.values())


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    total: Tensor = model(batch).float().square().sum()
    return total


def looks(model: nn.Module) -> list[Any]:
    parts = [(name, type(module), module.training) for name, module in model.named_modules()]
    flags = [(name, each.requires_grad) for name, each in model.named_parameters()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    return [parts, flags, hooks, list(model.state_dict())]


def refused(fields: dict[str, Any], model: Llama, match: str, **given: Any) -> InputError:
    """What it says; and the model is as it was, to the bit."""
    before = looks(model)
    numbers = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InputError, match=match) as error:
        value_of(**fields).attach(model, **given)
    assert "\n" not in str(error.value)
    assert looks(model) == before
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.int32), numbers[name].view(torch.int32)), name
    assert all(parameter.grad is None for parameter in model.parameters())
    return error.value


@pytest.mark.parametrize("method", ROOMLESS)
def test_what_a_layer_has_no_room_for(method: str) -> None:
    fields, said = ROOMLESS[method]
    data = {"batches": [tokens(8), tokens(8, 6)], "loss": loss}
    refused({"method": method, **fields}, llama(), said, **data)


def test_every_adapter_is_asked() -> None:
    known = {name for name, record in catalog().items() if record.info.room == "adapters"}
    others = {"lora_limits", "qa_hira"}  # a diagnosis; and tiles at the edge may be smaller
    assert set(ROOMLESS) == known - others


def test_a_number_that_fp32_does_not_have() -> None:
    refused({"method": "lora", "alpha": 1e300}, llama(), r"alpha: is above 3\.4e\+38")
    refused({"method": "hydra", "scale": 1e39}, llama(), r"scale: is above")
    prepared = {"model.layers.0.mlp.up_proj": {"rank": 2, "alpha": 10**300}}
    refused({"method": "lora"}, llama(), "up_proj", prepared=Preparation(prepared))


@pytest.mark.parametrize("fields", WEIGHED, ids=named)
@pytest.mark.parametrize("spoilt", ["zero", "not finite"])
def test_a_weight_that_has_no_directions(fields: dict[str, Any], spoilt: str) -> None:
    model = llama()
    weight = model.get_parameter("model.layers.1.mlp.down_proj.weight").data
    if spoilt == "zero":
        weight.zero_()
    else:
        weight[3, 2] = torch.nan
    said = "is zero|above 0, the " if spoilt == "zero" else "not finite"
    error = refused(fields, model, said)
    assert "model.layers.1.mlp.down_proj" in str(error)


@pytest.mark.parametrize("method", ["pissa", "svfit", "lora_xs"])
def test_a_rank_above_that_of_a_weight(method: str) -> None:
    model = llama()
    weight = model.get_parameter("model.layers.1.mlp.down_proj.weight").data
    weight.copy_(weight[:, :1] * weight[:1])
    error = refused({"method": method, "rank": 4}, model, "above 1, the rank of the weight")
    assert "model.layers.1.mlp.down_proj" in str(error)


@pytest.mark.parametrize("fields", PROBING, ids=named)
def test_data_that_say_nothing(fields: dict[str, Any]) -> None:
    batches = [tokens(8), tokens(8, 6)]
    refused(fields, llama(), "give `batches` and `loss`")
    refused(fields, llama(), "no example|two batches|at least two", batches=[], loss=loss)

    def away(model: nn.Module, batch: Tensor) -> Tensor:
        model(batch)
        return torch.zeros((), requires_grad=True) * 1

    if fields.get("selection") != "activation":  # which asks for no gradient
        refused(fields, llama(), "no gradient", batches=batches, loss=away)
    model = llama()
    model.get_parameter("model.layers.0.mlp.up_proj.weight").data[0, 0] = torch.inf
    refused(fields, model, "not finite|is nan", batches=batches, loss=loss)


@pytest.mark.parametrize("selection", ["weight", "random"])
def test_columns_of_a_weight_that_is_not_finite(selection: str) -> None:
    model = llama()
    model.get_parameter("model.layers.0.mlp.down_proj.weight").data[0, 0] = torch.nan
    fields = {"method": "s2ft", "neurons": 0.3, "selection": selection}
    if selection == "weight":
        refused(fields, model, "not finite")
    else:  # nothing is read
        assert isinstance(value_of(**fields).attach(model), adapters.AttachedAdapter)

"""Which layers take a form, and what survives in files, plans and state dictionaries."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace

import torch
from torch import nn

from modicum.core.errors import InputError
from modicum.core.layers.form_layer import FormLayer
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.formed_model import FormedModel
from modicum.core.layers.linear_forms import DENSE, form_of, full_weight, linear_form, undense
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.layers.small_forms import larger_forms, small_forms_of
from modicum.models import ModelConfig, huggingface, saving
from modicum.models.decoders import config_of
from modicum.models.llama import Llama
from modicum.proofs.contracts.adapters.subjects import llama
from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.linears.subjects import (
    LinearSubject,
    assert_close,
    assert_same,
    decoder,
    decoder_config,
    form_of_value,
    layers,
    linears_check,
    numbers,
    odd_model,
    small,
    tokens,
)


@linears_check()
def check_targets(subject: LinearSubject) -> None:
    """It takes what `targets` names and `exclude` leaves; head and embeddings stay as they are."""
    value = small(subject)
    if form_of_value(value) is DENSE:
        raise NotApplicable("dense layers are what the others replace")
    planned = value.plan(llama())
    assert planned.layers, "it takes no layer"
    assert all(name.endswith("_proj") for name in planned.layers), "it takes more than projections"
    some = small(subject, targets=("*.mlp.*",), exclude=("up_proj",)).plan(llama())
    assert {name.rsplit(".", 1)[-1] for name in some.layers} == {"gate_proj", "down_proj"}
    for wrong in ({"targets": ("qproj",)}, {"exclude": ("all-linear",)}):
        try:
            small(subject, **wrong).plan(llama())
        except InputError:
            continue
        raise AssertionError(f"{wrong} was not refused")


@linears_check()
def check_plans_travel(subject: LinearSubject) -> None:
    """The plan survives JSON and config.json, and gives a model without memory the same shapes."""
    config = decoder_config(small(subject))
    plan = FormPlan.from_json(json.loads(json.dumps(config.forms.as_json())))
    assert plan == config.forms, "the plan is another after JSON"
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))).forms == config.forms
    with on_meta():
        bare = Llama(replace(config, forms=plan))
    assert all(parameter.is_meta for parameter in bare.parameters()), "it takes memory on meta"
    shapes = {name: tuple(p.shape) for name, p in bare.named_parameters()}
    expected = {name: tuple(p.shape) for name, p in decoder(small(subject)).named_parameters()}
    assert shapes == expected, "on meta it has other parameters"


@linears_check()
def check_state_dict(subject: LinearSubject) -> None:
    """A layer built on meta takes another's state dict and is the same to the bit, bf16 or fp32."""
    form = form_of_value(small(subject))
    for dtype in (torch.float32, torch.bfloat16):
        for layer, weight, arguments in layers(small(subject), dtype):
            outs, ins = weight.shape
            bias = layer._parameters["bias"] is not None
            with on_meta(dtype):
                bare = form.make(ins, outs, bias, **arguments)
            assert all(parameter.is_meta for parameter in bare.parameters()), "it takes memory"
            materialise(bare, "cpu")
            bare.load_state_dict(layer.state_dict())
            x = numbers(3, ins, dtype=dtype)
            assert torch.equal(bare(x), layer(x)), f"{dtype}: the loaded layer computes another"
            kinds = {name: p.dtype for name, p in layer.named_parameters()}
            assert kinds == {n: p.dtype for n, p in bare.named_parameters()}, "dtypes differ"


@linears_check()
def check_put_in_and_taken_out(subject: LinearSubject) -> None:
    """Converted, a model holds what its weights become; merged, it is dense and the same.

    Where no dense weight represents a layer, merging is refused, and nothing is changed.
    """
    value, model, x = small(subject), odd_model(), numbers(6, 7)
    before = {name: full_weight(m).detach().clone() for name, m in _linears(model).items()}
    handle = value.convert(model)
    for name, form in handle.plan.layers.items():
        made = linear_form(form.name).from_dense(before[name], None, **form.arguments)
        own = model.get_submodule(name).state_dict()
        made.register_parameter("bias", model.get_submodule(name)._parameters["bias"])
        assert_same(own, made.state_dict(), f"{name} holds something else")
    converted = model(x)
    twin = value.wrap(odd_model())
    for tensor in twin.state_dict().values():
        tensor.zero_()
    twin.load_state_dict(handle.state_dict())
    assert torch.equal(twin.model(x), converted), "the same tensors give other outputs"
    if "has_no_dense_weight" in value.traits:
        assert _refuses_to_merge(handle), "merging is not refused"
        assert torch.equal(model(x), converted), "refusing to merge changes the model"
        return
    handle.merge()
    assert all(type(module) is nn.Linear for module in _linears(model).values())
    assert len(_linears(model)) == len(before), "merging loses layers"
    assert_close(model(x), converted, 1e-5, "the merged model computes something else")


@linears_check(proves="export")
def check_files(subject: LinearSubject) -> None:
    """A decoder's files hold dense weights that compute the same, or its own tensors to the bit.

    Where no dense weight represents a layer, both folders hold its own tensors.
    """
    model, ids = decoder(small(subject)), tokens()
    with tempfile.TemporaryDirectory() as folder:
        dense = huggingface.load(saving.save(model, f"{folder}/dense"))
        kept = undense(model.config.forms)
        assert config_of(dense).forms == kept, "the dense folder is of other forms"
        assert_close(dense(ids), model(ids), 1e-4, "the dense folder computes something else")
        if not form_of_value(small(subject)).trains:
            return
        small_folder = saving.save(model, f"{folder}/small", dense=False)
        again = huggingface.load(small_folder)
        assert config_of(again).forms == model.config.forms, "the folder holds another plan"
        assert torch.equal(again(ids), model(ids)), "the small folder computes something else"
        forms = small_forms_of(model)
        least = huggingface.load(saving.save(model, f"{folder}/least", forms=forms))
        assert config_of(least).forms == forms, "the smallest folder is of other forms"
        assert_close(least(ids), model(ids), 1e-4, "the smallest folder computes something else")
        assert not larger_forms(least), "the smallest folder would be smaller with dense layers"
        with on_meta():
            filled = Llama(model.config)
        materialise(filled, "cpu")
        huggingface.fill(filled, small_folder)
        assert torch.equal(filled(ids), model(ids)), "filled from the small folder it is another"
        if not kept.layers and not all(map(_projects, _linears(model).values())):
            return
        huggingface.fill(filled, f"{folder}/dense")
        assert_close(filled(ids), model(ids), 1e-4, "filled from dense weights it is another")


def _projects(layer: nn.Module) -> bool:
    return not isinstance(layer, FormLayer) or layer.projects


def _refuses_to_merge(handle: FormedModel) -> bool:
    try:
        handle.merge()
    except InputError as error:
        return "no dense weight" in str(error)
    return False


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if form_of(module) is not None}

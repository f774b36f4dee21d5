"""Parameters of the base that an adapter trains in full, as copies of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.files import load
from modicum.core import torch_compiler
from modicum.core.contracts.catalog import of_value
from modicum.models.llama import Llama
from modicum.proofs.contracts.adapters.subjects import (
    REORDERED,
    AdapterSubject,
    adapters_check,
    assert_close,
    attached,
    llama,
    numbers,
    odd_model,
    start_tolerance,
    stir,
    tokens,
)
from modicum.proofs.contracts.small_training import SmallTraining, assert_resumes

NORMS = ("norm", "*layernorm")


@adapters_check()
def check_copies_are_trained_and_the_base_is_not(subject: AdapterSubject) -> None:
    """What `also` names begins as the base has it, is trained, and leaves that alone."""
    model, ids = llama(), tokens()
    plain = {name: value.detach().clone() for name, value in model.named_parameters()}
    bare = llama()
    attached(subject, bare)
    adapter = attached(subject, model, also=NORMS)
    copies = _copies(adapter)
    assert len(copies) == 5, f"of 5 norms there are {len(copies)} copies"
    assert torch.equal(model(ids), bare(ids)), "a fresh copy changes outputs"
    model(ids).square().sum().backward()
    for name, value in copies.items():
        assert value.grad is not None, f"{name} gets no gradient"
        assert value.grad.abs().max() > 0, f"{name} has no effect"
    stir(adapter)
    stir(attached(subject, other := llama()))
    assert not torch.equal(model(ids), other(ids)), "moved copies have no effect"
    state = model.state_dict()
    for name, own in plain.items():
        if name.endswith("norm.weight"):
            assert torch.equal(state[name], own), f"the base's own {name} is another"
    with adapter.disabled():
        off = "without the adapter it is not the base"
        assert_close(model(ids), llama()(ids), start_tolerance(subject), off)
    adapter.detach()
    assert_close(model(ids), llama()(ids), start_tolerance(subject), "detached it is not the base")


@adapters_check(unless=("after_block",))
def check_a_copied_bias_of_an_adapted_layer(subject: AdapterSubject) -> None:
    """The bias of a layer that has the adapter may be a copy: next to it, merged and unmerged."""
    model, inputs = odd_model(subject), numbers(4, 7)
    bias = model.get_submodule("wide").get_parameter("bias").detach().clone()
    adapter = attached(subject, model, also=("bias",))
    assert [name.rpartition(".")[2] for name in _copies(adapter)] == ["copy_bias"]
    start = model(inputs)
    with torch.no_grad():
        _copies(adapter)["wide.copy_bias"].add_(1.0)
    assert not torch.equal(model(inputs), start), "a moved bias has no effect"
    stir(adapter)
    _merges(subject, model, adapter, inputs)
    now = model.get_submodule("wide").get_parameter("bias")
    assert torch.equal(now, bias), "unmerged, the base's own bias is another"


@adapters_check()
def check_copies_are_merged_and_saved(subject: AdapterSubject) -> None:
    """Merged, copies are the base's parameters until they are unmerged; files and state have them.

    A switch to another adapter switches them too.
    """
    model, ids = llama(), tokens()
    adapter = stir(attached(subject, model, also=NORMS))
    adapted, copies = model(ids), _copies(adapter)
    record = of_value(adapter.method)
    with tempfile.TemporaryDirectory() as temporary:
        for form in ("modicum", None):
            folder = Path(temporary) / str(form)
            adapter.save(folder, form=form)
            other = llama()
            twin = load(other, folder, plugins=() if record.module else (record.file,))
            assert_close(other(ids), adapted, REORDERED, "loaded, it computes something else")
            assert _copies(twin).keys() == copies.keys(), "the loaded adapter has other copies"
    twin.detach()
    _merges(subject, model, adapter, ids)


@adapters_check(needs=("exact_resume",))
def check_copies_resume_to_the_bit(subject: AdapterSubject) -> None:
    """On a bf16 base and by way of meta, copies are fp32 and resume in a new model to the bit."""

    def start(seed: int = 0, kept: Mapping[str, Tensor] | None = None) -> SmallTraining:
        model: Llama = llama("meta").bfloat16()
        adapter = attached(subject, model, seed=seed, prepared_seed=0, also=NORMS)
        kinds = {value.dtype for value in _copies(adapter).values()}
        assert kinds == {torch.float32}, f"copies of bf16 norms are {kinds}"
        model.to_empty(device="cpu").initialise(0)
        adapter.initialise(kept=kept)
        return SmallTraining(model, _loss)

    assert_resumes(start, lambda saved: start(11, kept=saved["model"]))


@adapters_check(expensive=True, needs=("compiles",))
def check_copies_compile(subject: AdapterSubject) -> None:
    """Compiled as one graph, a model with copies gives the eager outputs to 1e-5."""
    model, ids = llama(), tokens()
    stir(attached(subject, model, also=NORMS))
    output = model(ids)
    torch.compiler.reset()
    compiled = torch_compiler.compiled(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(ids), output, 1e-5, "the compiled model computes something else")


def _copies(adapter: AttachedAdapter) -> dict[str, nn.Parameter]:
    return {name: value for name, value in adapter.named_parameters() if ".copy_" in name}


def _merges(
    subject: AdapterSubject, model: nn.Module, adapter: AttachedAdapter, inputs: Tensor
) -> None:
    """Merged and unmerged, the model computes the same, and its parameters are as before."""
    if "mergeable" not in subject.info.traits:
        return
    adapted, copies = model(inputs), _copies(adapter)
    names = [name.replace(".copy_", ".") for name in copies]
    before = {name: model.get_parameter(name).detach().clone() for name in names}
    adapter.merge()
    assert_close(model(inputs), adapted, 1e-5, "merged, it computes something else")
    adapter.unmerge()
    assert_close(model(inputs), adapted, 1e-5, "unmerged, it computes something else")
    for name, value in before.items():
        assert torch.equal(model.get_parameter(name), value), f"unmerged, {name} is another"


def _loss(model: nn.Module, step: int) -> Tensor:
    return model(tokens(length=4 + step)).square().mean()

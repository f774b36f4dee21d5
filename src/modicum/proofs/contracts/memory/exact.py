"""What a policy may change, and what it must leave to the bit."""

from __future__ import annotations

import gc

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from modicum.core.layers.saved_tensors import Need
from modicum.proofs.contracts.memory.subjects import (
    MemorySubject,
    batch,
    classifier,
    gradients,
    is_weight_of_convolution,
    memory_check,
    small,
)


@memory_check()
def check_errors_stay_in_their_layer(subject: MemorySubject) -> None:
    """Gradients of inputs, biases and all that is no convolution's weight are exact, to the bit."""
    for norm in ("none", "group"):
        model = classifier(norm)
        exact = gradients(model, None)
        found = gradients(model, small(subject).attach(model))
        for name, gradient in exact.items():
            if not is_weight_of_convolution(name, exact):
                assert torch.equal(found[name], gradient), f"the gradient of {name} has changed"


@memory_check()
def check_weight_gradients_are_near(subject: MemorySubject) -> None:
    """Before anything was measured, weight gradients are off by a twentieth at most, in norm."""
    for half in (False, True):
        model = classifier()
        exact = gradients(model, None, half=half)
        found = gradients(model, small(subject).attach(model), half=half)
        for name, gradient in exact.items():
            off = float((found[name] - gradient).norm() / gradient.norm())
            assert off <= 0.05, f"the gradient of {name} is off by {off:.3g}"


@memory_check()
def check_storages_are_let_go(subject: MemorySubject) -> None:
    """Of what it stores in other form, nothing else keeps the storage."""
    model, storages = classifier(), []

    def note(tensor: Tensor) -> Tensor:
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: note(output))
    runtime = small(subject).attach(model)
    with runtime.context():
        loss = model(batch()[0]).sum()
    gc.collect()
    by_need = runtime.saved.by_need()
    covered = by_need[Need.VALUES][1]
    assert covered > 0, "no convolution's input is stored in another form"
    # The last block's output is averaged, and autograd keeps no copy of it.
    alive = sum(not storage.expired() for storage in storages)
    assert not alive, f"{alive} of {len(storages)} outputs of blocks are still there"
    del loss


@memory_check()
def check_bytes_are_fewer_and_given_back(subject: MemorySubject) -> None:
    """It holds less than autograd alone would, and after the backward pass nothing."""
    model = classifier()
    runtime = small(subject).attach(model)
    with runtime.context():
        loss = model(batch()[0]).sum()
    held, plain = runtime.held_bytes, runtime.saved.plain_bytes
    assert held < 0.75 * plain, f"it holds {held} bytes of {plain}"
    loss.backward()
    left = runtime.held_bytes
    assert left == 0, f"after the backward pass it holds {left} bytes"


@memory_check()
def check_unpacking_is_repeatable(subject: MemorySubject) -> None:
    """Two backward passes through one graph give the same gradients, to the bit."""
    model = classifier()
    runtime = small(subject).attach(model)
    with runtime.context():
        loss = model(batch()[0]).square().sum()
    parameters = list(model.parameters())
    once = torch.autograd.grad(loss, parameters, retain_graph=True)
    again = torch.autograd.grad(loss, parameters)
    assert all(map(torch.equal, once, again)), "the second backward pass gave other gradients"


@memory_check()
def check_memory_formats(subject: MemorySubject) -> None:
    """Tensors with channels last come back with channels last, and dense gradients are exact."""
    model = classifier()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    exact = gradients(model, None)
    found = gradients(model, small(subject).attach(model))
    for name, gradient in exact.items():
        assert found[name].stride() == gradient.stride(), f"{name} has other strides"
        if not is_weight_of_convolution(name, exact):
            assert torch.equal(found[name], gradient), f"the gradient of {name} has changed"

"""What layers in a form spend against what the form and the decoder's ledger say."""

from __future__ import annotations

from dataclasses import replace

import torch

from modicum.core.layers.linear_forms import frozen_linears
from modicum.core.machine.memory import tensor_bytes
from modicum.models.config import ModelConfig
from modicum.models.ledger import AdapterActivations, held, ledger
from modicum.models.llama import create
from modicum.proofs.contracts.adapters.ledger import _flops, _saved
from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.linears.subjects import (
    LinearSubject,
    decoder,
    decoder_config,
    form_of_value,
    layers,
    linears_check,
    small,
)
from modicum.proofs.contracts.traced_change import DEEP, SHAPE, Change, traced


@linears_check()
def check_bytes_of_a_layer(subject: LinearSubject) -> None:
    """A layer's tensors take the bytes that the form says, exactly, in fp32 and bf16."""
    form = form_of_value(small(subject))
    for dtype in (torch.float32, torch.bfloat16):
        for layer, weight, arguments in layers(small(subject), dtype):
            outs, ins = weight.shape
            bias = layer._parameters["bias"] is not None
            real = sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))
            said = form.weight_bytes(ins, outs, bias, dtype.itemsize, **arguments)
            assert said == real, f"{[outs, ins]}, {dtype}: it says {said} bytes, there are {real}"


@linears_check()
def check_rows_by_which_ranks_shard(subject: LinearSubject) -> None:
    """Each tensor has the rows, and each row the bytes, by which plans share them over ranks."""
    form = form_of_value(small(subject))
    for layer, weight, arguments in layers(small(subject)):
        said = form.rows(weight.shape[1], weight.shape[0], 4, **arguments)
        real = [
            (tensor.shape[0], tensor.nbytes // tensor.shape[0])
            for name, tensor in layer.named_parameters()
            if name != "bias"
        ]
        assert sorted(said) == sorted(real), f"it says {sorted(said)}, the layer has {sorted(real)}"


@linears_check()
def check_bytes_of_a_decoder(subject: LinearSubject) -> None:
    """The decoder's ledger says the bytes of its weights exactly, and names what files hold."""
    config = decoder_config(small(subject))
    model = decoder(small(subject))
    # Frozen weights alone are what an adapter works on; here it keeps nothing.
    adapted = AdapterActivations() if frozen_linears(model) else None
    said = ledger(config, SHAPE, adapted=adapted).bytes("weight")
    real = tensor_bytes([*model.parameters(), *model.buffers()])
    assert said == real, f"the ledger says {said} bytes of weights, there are {real}"
    assert held(config, 4).keys() == config.parameter_shapes().keys()


@linears_check()
def check_work(subject: LinearSubject) -> None:
    """Matrix products of training a decoder are those that PyTorch counts."""
    if not form_of_value(small(subject)).trains:
        raise NotApplicable("weights in this form are not trained")
    config = decoder_config(small(subject))
    said, counted = ledger(config, SHAPE), _flops(create(config, 0))
    for phase, real in zip(("forward", "backward"), counted, strict=True):
        predicted = said.flops(phase)
        assert predicted == real, f"{phase}: the ledger says {predicted}, PyTorch counts {real}"


@linears_check()
def check_activations(subject: LinearSubject) -> None:
    """What autograd keeps of a decoder's forward pass is what the ledger says, to 5 %."""
    if not form_of_value(small(subject)).trains:
        raise NotApplicable("weights in this form are not trained")
    config = replace(decoder_config(small(subject), layers=4), initializer_range=0.3)
    predicted = ledger(config, SHAPE).bytes("activation", "loss")
    measured = _saved(create(config, 0))
    assert abs(measured - predicted) <= 0.05 * measured, (
        f"the ledger says {predicted} bytes, autograd saves {measured}"
    )


@linears_check()
def check_trace(subject: LinearSubject) -> None:
    """Traced, a decoder in the form differs from a dense one as the ledger says, within 5 %."""
    config = decoder_config(small(subject), layers=DEEP.layers)
    # Of frozen weights, what is there when gradients flow through all blocks.
    frozen = AdapterActivations({"model.embed_tokens": 0})
    adapted = None if form_of_value(small(subject)).trains else frozen

    def traced_change(made: ModelConfig) -> Change:
        model = create(made, 0)
        model.requires_grad_(adapted is None)
        return Change.of(traced(model, flows=adapted is not None))

    said = Change.of(ledger(config, SHAPE, adapted=adapted))
    dense = Change.of(ledger(DEEP, SHAPE, adapted=adapted))
    before = traced_change(DEEP)
    traced_change(config).since(before).assert_said(said.since(dense), before.kept)

"""What a compressed layer spends against what the ledger says, as differences from the dense."""

from __future__ import annotations

from typing import cast

from modicum.compress.compressed_model import CompressedModel
from modicum.core.machine.memory import tensor_bytes
from modicum.models import create
from modicum.models.llama import Llama
from modicum.proofs.contracts.adapters.ledger import _flops, _saved
from modicum.proofs.contracts.compress.subjects import (
    CompressSubject,
    compress_check,
    compressed,
    llama,
    small,
)
from modicum.proofs.contracts.traced_change import DEEP, SHAPE, Change, traced


@compress_check()
def check_parameters_and_bytes(subject: CompressSubject) -> None:
    """Trained parameters and persistent bytes change by what the ledger says, exactly."""
    dense = llama()
    handle = compressed(small(subject))
    before, after = (tensor_bytes(list(model.parameters())) for model in (dense, handle.model))
    said = handle.ledger(SHAPE).bytes("weight")
    assert after - before == said, f"the ledger says {said:+} bytes, there are {after - before:+}"
    for name, layer in handle.layers.items() if isinstance(handle, CompressedModel) else ():
        form = handle.model.get_submodule(name)
        real = sum(p.numel() for n, p in form.named_parameters() if n != "bias")
        predicted = handle.method.trained(layer) if handle.method else 0
        assert predicted == real, f"trained() says {predicted} elements of {name}, it has {real}"
    report = handle.report
    assert report is not None
    assert report.bytes_after - report.bytes_before == said, "the report tells other bytes"


@compress_check()
def check_work(subject: CompressSubject) -> None:
    """Matrix-product work changes by what the ledger says, as PyTorch counts it."""
    handle = compressed(small(subject))
    dense, factored = (_flops(cast(Llama, model)) for model in (llama(), handle.model))
    said = handle.ledger(SHAPE)
    for phase, before, after in zip(("forward", "backward"), dense, factored, strict=True):
        predicted = said.flops(phase)
        assert after - before == predicted, (
            f"the ledger says {predicted:+} operations in the {phase} pass, PyTorch counts "
            f"{after - before:+}"
        )


@compress_check()
def check_activations(subject: CompressSubject) -> None:
    """Saved activations change by what the ledger says, to 5 % of the dense model's."""
    full = _saved(create(DEEP, seed=0))
    handle = compressed(small(subject), create(DEEP, seed=0))
    predicted = handle.ledger(SHAPE).bytes("activation")
    measured = _saved(cast(Llama, handle.model)) - full
    assert abs(measured - predicted) <= 0.05 * full, (
        f"the ledger says {predicted:+} bytes against the dense model's {full}, autograd saves "
        f"{measured:+}"
    )


@compress_check()
def check_trace(subject: CompressSubject) -> None:
    """Traced, the compressed model differs from the dense one as the ledger says, within 5 %."""
    dense = Change.of(traced(create(DEEP, seed=0)))
    handle = compressed(small(subject), create(DEEP, seed=0))
    found = Change.of(traced(cast(Llama, handle.model))).since(dense)
    found.assert_said(Change.of(handle.ledger(SHAPE)), dense.kept)

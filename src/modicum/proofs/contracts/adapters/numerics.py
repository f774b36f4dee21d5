"""What precision, dropout, compilation and recomputation must not change."""

from __future__ import annotations

import torch
from torch import Tensor

from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.core import torch_compiler
from modicum.models.llama import Llama
from modicum.proofs.contracts.adapters.subjects import (
    AdapterSubject,
    adapters_check,
    assert_close,
    attached,
    distance,
    dropped,
    llama,
    stir,
    tokens,
)


@adapters_check()
def check_bf16_base(subject: AdapterSubject) -> None:
    """On a bf16 base factors stay fp32, outputs are bf16 and near the fp32 model's; dropout works.

    Of one that prepares from data, where it has prepared from the same.
    """
    # Of the same weights, as an adapter may depend on every digit of them.
    model, ids = llama().bfloat16().float(), tokens()
    stir(attached(subject, model))
    exact = model(ids)
    half = llama().bfloat16()
    adapter = stir(attached(subject, half, prepared_on=llama().bfloat16().float()))
    kinds = {value.dtype for value in adapter.parameters()}
    assert kinds <= {torch.float32}, f"on a bf16 base the factors are {kinds}"
    output = half(ids)
    assert output.dtype == torch.bfloat16, f"on a bf16 base outputs are {output.dtype}"
    assert distance(output, exact) < 0.1, "on a bf16 base outputs are far from the fp32 model's"
    gradients = _gradients(half, adapter, ids)
    assert all(value.dtype == torch.float32 for value in gradients), "a gradient is not fp32"
    assert all(bool(value.isfinite().all()) for value in gradients), "a gradient is not finite"
    if dropped(subject, 0.5):
        some = llama().bfloat16()
        stir(attached(subject, some, prepared_on=llama().bfloat16().float(), dropout=0.5))
        assert some.train()(ids).dtype == torch.bfloat16, "with dropout outputs are not bf16"


@adapters_check()
def check_autocast(subject: AdapterSubject) -> None:
    """Under bf16 autocast the layers give bf16, factors and gradients stay fp32."""
    model, ids = llama(), tokens()
    adapter = stir(attached(subject, model))
    exact = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(ids)
        output.float().square().mean().backward()
    assert output.dtype == torch.bfloat16, f"under autocast outputs are {output.dtype}"
    # By norms: single outputs of a model whose layers were changed by more than their own size may
    # be further off.
    off = (output.double() - exact.double()).norm() / exact.double().norm()
    assert float(off) < 0.2, "under autocast outputs are far from the fp32 ones"
    for name, value in model.named_parameters():
        if value.requires_grad:
            assert value.grad is not None, f"under autocast {name} gets no gradient"
            assert value.grad.dtype == torch.float32, f"{name}'s gradient is {value.grad.dtype}"
    assert all(value.dtype == torch.float32 for value in adapter.parameters()), "not fp32"


@adapters_check(unless=("writes_base",))
def check_dropout(subject: AdapterSubject) -> None:
    """Dropout follows torch's generator, acts in training alone, and spares the base."""
    model, ids = llama(), tokens()
    stir(attached(subject, model, dropout=0.5))
    plain = llama()
    stir(attached(subject, plain, dropout=0.0))

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(ids)

    model.train()
    assert torch.equal(run(1), run(1)), "the same generator state gives another output"
    assert not torch.equal(run(1), run(2)), "dropout does nothing in training"
    model.eval()
    assert torch.equal(run(1), run(2)), "dropout acts in evaluation"
    assert_close(run(1), plain(ids), 1e-5, "evaluation differs from the adapter without dropout")
    if not {"starts_near", "starts_elsewhere"} & set(subject.info.traits):
        # A fresh adapter adds nothing, so what dropout changes here is the base's own part.
        fresh = llama()
        attached(subject, fresh, dropout=0.5)
        assert torch.equal(fresh(ids), llama()(ids)), "dropout reaches the base's own path"


@adapters_check()
def check_recomputation(subject: AdapterSubject) -> None:
    """Under activation recomputation gradients are the same to the bit, with dropout too."""
    gradients = []
    for recompute in (False, True):
        model = llama()
        model.recompute = recompute
        adapter = stir(attached(subject, model, dropout=dropped(subject, 0.2)))
        torch.manual_seed(5)
        gradients.append(_gradients(model, adapter, tokens()))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other), "recomputed activations give another gradient"


@adapters_check()
def check_accumulation(subject: AdapterSubject) -> None:
    """Gradients of two halves of a batch add up to those of the full batch, to 1e-5."""
    model, ids = llama(), tokens(4)
    adapter = stir(attached(subject, model))
    whole = _gradients(model, adapter, ids)
    for half in ids.split(2):
        model(half).square().sum().backward()
    for value, expected in zip(adapter.parameters(), whole, strict=True):
        assert value.grad is not None, "a factor gets no gradient"
        found = distance(value.grad, expected)
        assert found <= 1e-5, f"accumulated gradients differ by {found:.3g}"


@adapters_check(expensive=True, needs=("compiles",))
def check_compiles(subject: AdapterSubject) -> None:
    """Compiled as one graph, outputs equal the eager ones to 1e-5, and gradients to 1e-4."""
    model, ids = llama(), tokens()
    adapter = stir(attached(subject, model))
    output, gradients = model(ids), _gradients(model, adapter, ids)
    # aot_eager traces forward and backward as inductor does, and needs no C++ compiler.
    torch.compiler.reset()
    compiled = torch_compiler.compiled(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(ids), output, 1e-5, "the compiled model computes something else")
    compiled(ids).square().sum().backward()
    for value, expected in zip(adapter.parameters(), gradients, strict=True):
        assert value.grad is not None, "compiled, a factor gets no gradient"
        # Where a change is larger than its layer, a gradient carries the rounding of many products.
        assert_close(value.grad, expected, 1e-4, "compiled, a gradient is another")


def _gradients(model: Llama, adapter: AttachedAdapter, ids: Tensor) -> list[Tensor]:
    """Gradients of the factors for the sum of squared logits; none are left behind."""
    model(ids).float().square().sum().backward()
    found = []
    for value in adapter.parameters():
        assert value.grad is not None, "a factor gets no gradient"
        found.append(value.grad.clone())
        value.grad = None
    return found

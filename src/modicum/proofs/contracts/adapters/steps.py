"""An adapter in the steps of a run: what it counts, draws and adds to the loss, once an update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.steps import AdapterSteps
from modicum.core import torch_compiler
from modicum.core.contracts.parameters import is_idle, metadata
from modicum.core.layers.recomputing import recomputing_in
from modicum.models.llama import Llama
from modicum.proofs.contracts.adapters.subjects import (
    AdapterSubject,
    adapters_check,
    assert_close,
    attached,
    llama,
    stir,
    tokens,
)
from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.transformers_loop import hugging_face_llama, train_under_transformers


@adapters_check(needs=("follows_steps",))
def check_steps_count_once(subject: AdapterSubject) -> None:
    """What passes count is entered once: recomputed or not, in one micro-batch or several.

    Evaluations, passes without gradients, those of which no update came and those of a rank that
    has no rows enter nothing.
    """
    model, _, steps = _following(subject)
    expected = _entered_by(model, steps, [tokens(4)])
    for recompute in (False, True):
        model.recompute = recompute
        with recomputing_in(lambda: steps.forward_context("recompute")):
            once = _entered_by(model, steps, [tokens(4)])
            _assert_entered(once, expected, f"with recompute {recompute}, it counts otherwise")
            halves = _entered_by(model, steps, tokens(4).split(2))
            _assert_entered(halves, expected, "of two micro-batches it counts otherwise")
        model.eval()
        model(tokens()).square().sum().backward()
        model.train()
        with torch.no_grad():
            model(tokens())
        steps.before_forward(0.0)
        model(tokens()).square().sum().backward()
        _assert_entered([x.entered() for x in steps.layers], expected, "a pass counts that is none")
        steps.before_forward(1.0)
        model(tokens()).square().sum().backward()
        steps.before_update(steps.updates + 1)
        gone = [layer.entered() for layer in steps.layers]
        assert not any(bool(x.any()) for x in gone), "counts are left of passes without an update"
    steps.close()
    model(tokens()).square().sum().backward()
    gone = [layer.entered() for layer in steps.layers]
    assert not any(bool(x.any()) for x in gone), "closed, it counts"


@adapters_check(needs=("follows_steps",))
def check_steps_add_their_term_once(subject: AdapterSubject) -> None:
    """A term's gradient is added once an update, in shares, and what is reported is the term."""
    model, adapter, steps = _following(subject)
    if not steps.adds:
        raise NotApplicable("it adds no term to the loss")
    terms = [term for layer in steps.layers if (term := layer.term()) is not None]
    total = torch.stack([term.reshape(()) for term in terms]).sum()
    factors = list(adapter.parameters())
    expected = torch.autograd.grad(total, factors, allow_unused=True, materialize_grads=True)
    assert any(bool(one.any()) for one in expected), "its term has no gradient"
    for recompute in (False, True):
        model.recompute = recompute
        for shares in ((1.0,), (0.25, 0.75), (1.0, 0.0)):
            for share in shares:
                steps.before_forward(share)
                (0 * model(tokens())).sum().backward()
            for value, one in zip(factors, expected, strict=True):
                assert value.grad is not None, "a factor gets no gradient"
                assert_close(value.grad, one, 1e-5, f"in shares {shares} it adds otherwise")
                value.grad = None
            found = torch.tensor(steps.added_loss() or 0.0)
            assert_close(found, total.detach(), 1e-5, "what it reports is not its term")
            steps.before_update(steps.updates + 1)


@adapters_check(needs=("follows_steps",))
def check_steps_resume(subject: AdapterSubject) -> None:
    """Two updates, and two after a state was loaded, are to the bit four updates."""
    model, adapter, steps = _following(subject)
    _updates(model, steps, adapter, 4)
    half, begun, first = _following(subject)
    _updates(half, first, begun, 2)
    kept = {name: value.clone() for name, value in begun.state_dict().items()}
    again, later, second = _following(subject)
    later.load_state_dict(kept)
    second.load_state_dict(first.state_dict())
    _updates(again, second, later, 2)
    assert second.updates == steps.updates == 4, "the number of updates is another"
    for name, value in adapter.state_dict().items():
        assert torch.equal(later.state_dict()[name], value), f"{name} is another after resuming"


@adapters_check(needs=("follows_steps",))
def check_steps_leave_idle_factors(subject: AdapterSubject) -> None:
    """A factor that is idle in an update stays, to the bit, under AdamW with momentum and decay.

    Its state counts the updates in which it was not; and closed, no factor is idle.
    """
    model, adapter, steps = _following(subject)
    factors = list(adapter.parameters())
    if all(metadata(value).turn is None for value in factors):
        raise NotApplicable("all its factors take part in every update")
    optimizer = torch.optim.AdamW(factors, lr=1e-2, weight_decay=0.1)
    counts = [0 for _ in factors]
    for _ in range(6):
        before = [(value.detach().clone(), is_idle(value)) for value in factors]
        model(tokens(4)).square().mean().backward()
        optimizer.step()
        for index, (value, (then, idle)) in enumerate(zip(factors, before, strict=True)):
            assert torch.equal(value, then) == idle, "an idle factor moves, or another one does not"
            counts[index] += not idle
        optimizer.zero_grad()
        steps.update()
    assert min(counts) < 6, "no factor is ever idle"
    for value, count in zip(factors, counts, strict=True):
        state = optimizer.state.get(value)
        found = 0 if state is None else int(state["step"])
        assert found == count, f"its state counts {found} updates of {count}"
    steps.close()
    assert not any(is_idle(value) for value in factors), "closed, a factor is idle"


@adapters_check(expensive=True, needs=("follows_steps", "compiles"))
def check_steps_compile(subject: AdapterSubject) -> None:
    """Compiled as one graph, it counts what it does otherwise, and adds the same gradients."""
    model, adapter, steps = _following(subject)
    expected = _entered_by(model, steps, tokens(4).split(2))
    gradients = [None if p.grad is None else p.grad.clone() for p in adapter.parameters()]
    model.zero_grad()
    torch.compiler.reset()
    compiled = torch_compiler.compiled(model, backend="aot_eager", fullgraph=True)
    found = _entered_by(compiled, steps, tokens(4).split(2))
    _assert_entered(found, expected, "compiled, it counts otherwise")
    for value, one in zip(adapter.parameters(), gradients, strict=True):
        assert value.grad is not None, "compiled, a factor gets no gradient"
        assert one is not None, "a factor gets no gradient"
        assert_close(value.grad, one, 1e-4, "compiled, a gradient is another")


@adapters_check(expensive=True, needs=("follows_steps",))
def check_steps_under_transformers(subject: AdapterSubject) -> None:
    """`steps().callback()` sees every update of `transformers.Trainer`, and leaves at its end."""
    model = hugging_face_llama()
    base = {name: value.detach().clone() for name, value in model.named_parameters()}
    adapter = attached(subject, model, weights=lambda name: base[f"{name}.weight"])
    steps = adapter.steps()
    train_under_transformers(
        model,
        tokens(8),
        max_steps=3,
        learning_rate=1e-2,
        gradient_accumulation_steps=2,
        max_grad_norm=0,
        callback=steps.callback(),
    )
    assert steps.updates == 3, f"it saw {steps.updates} updates of 3"
    assert not any(layer.followed for layer in steps.layers), "it counts after its trainer's end"


def _following(subject: AdapterSubject) -> tuple[Llama, AttachedAdapter, AdapterSteps]:
    model = llama()
    adapter = stir(attached(subject, model))
    return model, adapter, adapter.steps()


def _entered_by(model: Llama, steps: AdapterSteps, batches: Sequence[Tensor]) -> list[Tensor]:
    """What an update's micro-batches of as many rows enter."""
    steps.before_update(steps.updates + 1)
    for batch in batches:
        steps.before_forward(1 / len(batches))
        model(batch).square().sum().backward()
    steps.before_forward(1.0)
    return [layer.entered().clone() for layer in steps.layers]


def _assert_entered(found: list[Tensor], expected: list[Tensor], what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        # Counts of what rounding decides may differ by one.
        assert bool(((one - other).abs() <= 1 + 1e-5 * other.abs()).all()), what
        assert bool(one.any()) == bool(other.any()), what
        assert_close(one[-1:], other[-1:], 1e-5, what)


def _updates(model: Llama, steps: AdapterSteps, adapter: AttachedAdapter, count: int) -> None:
    optimizer = torch.optim.SGD(adapter.parameters(), lr=1e-3)
    for _ in range(count):
        model(tokens(4)).square().mean().backward()
        optimizer.step()
        steps.update()
        optimizer.zero_grad()

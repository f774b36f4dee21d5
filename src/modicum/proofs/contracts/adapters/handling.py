"""How an adapter sits on a model: what it freezes, owns, switches and leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modicum.adapters.adapted_layer import wearers
from modicum.core.errors import InputError
from modicum.proofs.contracts.adapters.subjects import (
    AdapterSubject,
    adapters_check,
    another,
    assert_close,
    attached,
    llama,
    numbers,
    odd_model,
    rewrites,
    some_targets,
    start_tolerance,
    stir,
    tokens,
)


@adapters_check()
def check_only_the_adapter_is_trained(subject: AdapterSubject) -> None:
    """Base parameters are frozen, get no gradient, and are to the bit the same after training."""
    model = odd_model(subject)
    base = dict(model.named_parameters())
    adapter = attached(subject, model)
    before = {name: value.detach().clone() for name, value in base.items()}
    own = {id(parameter) for parameter in adapter.parameters()}
    taught = {id(value) for value in model.parameters() if value.requires_grad}
    assert own == taught, "adapter.parameters() are not just the model's trained parameters"
    assert not own & {id(value) for value in base.values()}, "a base parameter is trained"
    trained = {name: value.detach().clone() for name, value in adapter.named_parameters()}
    kept = {n: v.clone() for n, v in adapter.state_dict().items() if n not in trained}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model(numbers(4, 7, name=f"{step}")).square().sum().backward()
        for name, value in base.items():
            assert value.grad is None, f"the frozen {name} has a gradient"
        optimizer.step()
        optimizer.zero_grad()
    for name, value in base.items():
        assert torch.equal(value, before[name]), f"training changed the frozen {name}"
    end = adapter.state_dict()
    stuck = [name for name in trained if torch.equal(trained[name], end[name])]
    assert not stuck, f"three steps of training leave {stuck[0]} as it was"
    moved = [name for name in kept if not torch.equal(kept[name], end[name])]
    assert not moved, f"training changed {moved[0]}, which is not trained"


@adapters_check()
def check_several_adapters_and_switching(subject: AdapterSubject) -> None:
    """Two adapters on one model: alone, together, off, and `disabled()` gives the base.

    Of those that rewrite the base weight a second one is refused, and LoRA is the other here. Of
    those that are to be applied first a second one is not applied after another.
    """
    model, inputs = odd_model(subject), numbers(4, 7)
    base = model(inputs)
    first = stir(attached(subject, model, name="first"))
    alone = model(inputs)
    if rewrites(subject):
        again = partial(attached, subject, model, name="second")
        _is_refused(again, "two that rewrite the base weight")
        assert torch.equal(model(inputs), alone), "a refused adapter has changed the model"
    second = stir(another(subject, model, "second"))
    other = model(inputs)
    assert not torch.equal(alone, other), "adapters with other factors compute the same"
    first.activate()
    assert torch.equal(model(inputs), alone), "switching back gives another output"
    with first.disabled():
        off = "without the adapter it is not the base"
        assert_close(model(inputs), base, start_tolerance(subject), off)
    assert torch.equal(model(inputs), alone), "after disabled() the adapter is not as it was"
    trained = {id(value) for value in model.parameters() if value.requires_grad}
    assert trained == {id(value) for value in first.parameters()}, "an unused adapter is trained"
    if "applies_first" in subject.info.traits:
        _is_refused(lambda: second.activate(alone=False), "a second one to be applied first")
    else:
        second.activate(alone=False)
        both = model(inputs)
        assert not any(torch.equal(both, one) for one in (alone, other)), "two do as one does"
    second.deactivate()
    assert torch.equal(model(inputs), alone), "deactivate() leaves the adapter on"
    _is_refused(partial(attached, subject, model, name="first"), "a name that is taken")


@adapters_check()
def check_weights_scale_the_change(subject: AdapterSubject) -> None:
    """Active with a weight of 0.7, a layer gives what it does without plus 0.7 of the change.

    With 0 that is what it gives without; a merge of the same weight gives the same.
    """
    model, ids = llama().double(), tokens()
    adapter = stir(attached(subject, model))
    given: dict[str, tuple[nn.Module, Any, dict[str, Any]]] = {}
    hooks = [
        module.register_forward_hook(
            lambda module, args, named, _, name=name: given.update({name: (module, args, named)}),
            with_kwargs=True,
        )
        for name, module in wearers(model)
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    assert given, "none of its layers runs"
    for name, (module, args, named) in given.items():
        outputs = {}
        for weight in (1.0, 0.7, 0.0):
            adapter.activate(weight)
            outputs[weight] = _output(module(*args, **named))
        adapter.deactivate()
        without = _output(module(*args, **named))
        expected = without + 0.7 * (outputs[1.0] - without)
        assert_close(outputs[0.7], expected, 1e-6, f"{name} with a weight is not in proportion")
        assert_close(outputs[0.0], without, 1e-6, f"{name} with a weight of 0 changes its layer")
    adapter.activate(0.7)
    weighted = model(ids)
    if "mergeable" in subject.info.traits:
        adapter.merge()
        assert_close(model(ids), weighted, 1e-5, "merged with a weight it computes something else")
        adapter.unmerge()
        assert_close(model(ids), weighted, 1e-5, "unmerged, it has another weight")


@adapters_check()
def check_detach_leaves_the_model_as_it_was(subject: AdapterSubject) -> None:
    """Detached, the model has its own modules, names and trainable parameters again."""
    model, inputs = odd_model(subject), numbers(4, 7)
    base = model(inputs)
    nn.Module.requires_grad_(model.get_submodule("narrow"), False)
    shape = _shape(model)
    first = stir(attached(subject, model, name="first"))
    second = stir(another(subject, model, "second"))
    first.detach()
    second.detach()
    assert _shape(model) == shape, "modules, names or trainable parameters differ after detach"
    off = "the detached model is not the base"
    assert_close(model(inputs), base, start_tolerance(subject), off)
    if "mergeable" not in subject.info.traits:
        return
    third = stir(attached(subject, model))
    adapted = model(inputs)
    third.merge()
    third.detach()
    # A change of biases makes them where there are none.
    own = [entry for entry in _shape(model) if entry in shape or not entry[0].endswith(".bias")]
    assert own == shape, "modules or parameters differ after merge and detach"
    assert_close(model(inputs), adapted, 1e-5, "a merged and detached adapter leaves no change")


@adapters_check()
def check_start_is_a_function_of_seed_and_name(subject: AdapterSubject) -> None:
    """Whatever the order of construction and torch's own generator; and by way of meta."""
    whole = attached(subject, llama(), seed=3).state_dict()
    torch.manual_seed(99)
    torch.rand(5)
    some = some_targets(subject)
    part = attached(subject, llama(), seed=3, targets=some).state_dict()
    assert part, "an adapter on some of the layers has no factors"
    for name, value in part.items():
        assert torch.equal(value, whole[name]), f"{name} depends on the other targets"
    model = llama("meta")
    adapter = attached(subject, model, seed=3)
    model.to_empty(device="cpu").initialise(0)
    adapter.initialise()
    for name, value in adapter.state_dict().items():
        assert torch.equal(value, whole[name]), f"{name} starts otherwise when made on meta"
    if rewrites(subject) or "prepares_from_data" in subject.info.traits:
        return  # it starts from the weight or from data, perhaps whatever the seed
    again = attached(subject, llama(), seed=4)
    other = dict(again.named_parameters())
    read = {f"{n}.{key}" for n, layer in again.layers() for key in again.method.derived(layer.site)}
    drawn = [name for name in other if f"{name}_0" not in read]  # the others start from the weight
    random = [name for name in drawn if whole[name].unique().numel() > 1]
    same = [name for name in random if torch.equal(whole[name], other[name])]
    assert not same, f"{same[0]} starts alike with another seed"


@adapters_check(unless=("after_block",))
def check_tied_weights_are_refused(subject: AdapterSubject) -> None:
    """A layer whose weight another layer uses too is refused, and the model left as it was."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    shape = _shape(model)
    try:
        attached(subject, model)
    except InputError:
        assert _shape(model) == shape, "a refused adapter has changed the model"
        return
    raise AssertionError("an adapter on tied weights was not refused")


@adapters_check()
def check_follows_the_model(subject: AdapterSubject) -> None:
    """train(), eval() and to() of the model reach the adapter, also one that came in eval mode."""
    model = llama().eval()
    adapter = attached(subject, model)
    assert not any(layer.training for _, layer in adapter.layers()), "it starts in training mode"
    model.train()
    assert all(layer.training for _, layer in adapter.layers()), "train() does not reach it"
    model.to(torch.bfloat16)
    kinds = {value.dtype for value in adapter.parameters()}
    assert kinds <= {torch.bfloat16}, f"after model.to(bfloat16) the factors are {kinds}"
    output = model(tokens())
    assert output.dtype == torch.bfloat16, f"a bf16 model with the adapter gives {output.dtype}"


def _output(outputs: Any) -> Tensor:
    """What a layer gives, or a block to the residual stream."""
    found = outputs[0] if isinstance(outputs, tuple) else outputs
    assert isinstance(found, Tensor)
    return found.detach()


def _is_refused(work: Callable[[], object], what: str) -> None:
    try:
        work()
    except InputError:
        return
    raise AssertionError(f"{what} was not refused")


def _shape(model: nn.Module) -> list[tuple[str, str, bool]]:
    modules = [(name, type(module).__name__, False) for name, module in model.named_modules()]
    return modules + [(name, "", value.requires_grad) for name, value in model.named_parameters()]

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from modicum.core.contracts.parameters import (
    ParameterMetadata,
    describe_parameter,
    optimizer_groups,
)
from modicum.core.contracts.state import (
    StateRegistry,
    model_view,
    optimizer_state,
    optimizer_view,
    random_state,
    random_view,
    trained_state,
)
from modicum.core.errors import InputError
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import is_sharded, whole


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(optimizer_groups(model, learning_rate=0.1, weight_decay=0.1))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    inputs = torch.arange(24.0).view(8, 3) / 10
    for _ in range(count):
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def copied(state):
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def test_a_registry_gives_and_takes_the_whole_state():
    registry, box = StateRegistry(), {"x": 1}
    registry.add("box", lambda: dict(box), box.update)
    with pytest.raises(ValueError, match="'box' is registered already"):
        registry.add("box", dict, lambda _: None)
    layer = nn.Linear(2, 2)
    registry.add_object("layer", layer)
    saved = {name: copied(view) for name, view in registry.read().items()}
    box["x"] = 2
    with torch.no_grad():
        layer.weight.zero_()
    registry.write(saved)
    assert box == {"x": 1}
    assert torch.equal(layer.weight, saved["layer"]["weight"])


def test_state_that_is_missing_or_nobodys_is_named():
    registry = StateRegistry()
    registry.add("mine", dict, lambda _: None)
    with pytest.raises(InputError, match=r"no state for \['mine'\].*nobody asks for: \['other'\]"):
        registry.write({"other": {}})


def test_frozen_parameters_are_not_state_and_buffers_are():
    net = model()
    net[0].requires_grad_(False)
    read, _ = trained_state(net)
    batch_norm = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert read().keys() == {*(f"1.{name}" for name in batch_norm), "2.weight", "2.bias"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("0.weight"), "other parameters.*0.weight"),
        (lambda s: s.update(extra=torch.zeros(1)), "other parameters.*extra"),
        (lambda s: s.update({"0.weight": torch.zeros(4, 4)}), r"0.weight is \(4, 4\)"),
        (lambda s: s.update({"0.weight": s["0.weight"].double()}), "torch.float64, the model's"),
    ],
)
def test_tensors_that_do_not_match_the_model_are_refused(change, message):
    read, write = trained_state(model())
    state = copied(read())
    change(state)
    with pytest.raises(InputError, match=message):
        write(state)


def test_training_goes_on_to_the_bit_from_a_saved_state():
    straight = model()
    optimizer = adam(straight)
    steps(straight, optimizer, 3)
    saved = copied(trained_state(straight)[0]()), copied(optimizer_state(optimizer)[0]())
    steps(straight, optimizer, 3)
    again = model()
    other = adam(again)
    trained_state(again)[1](saved[0])
    optimizer_state(other)[1](saved[1])
    steps(again, other, 3)
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_optimizer_state_goes_by_name_whatever_the_groups():
    one = model()
    optimizer = adam(one)
    steps(one, optimizer, 2)
    saved = copied(optimizer_state(optimizer)[0]())
    assert "0.weight/exp_avg" in saved
    # Other multipliers put the parameters into other groups, in another order.
    two = model()
    describe_parameter(two[2].bias, ParameterMetadata(learning_rate_multiplier=3.0))
    describe_parameter(two[0].weight, ParameterMetadata(weight_decay_multiplier=0.5))
    regrouped = adam(two)
    assert len(regrouped.param_groups) == 4
    optimizer_state(regrouped)[1](saved)
    for name, parameter in two.named_parameters():
        assert torch.equal(regrouped.state[parameter]["exp_avg"], saved[f"{name}/exp_avg"])
        assert regrouped.state[parameter]["step"] == 2


@pytest.mark.parametrize("word", ["fused", "capturable"])
def test_the_count_of_updates_is_where_the_step_reads_it(word: str):
    layer = nn.Linear(2, 1, device="meta")
    options = {"lr": 0.1, "names": ["weight", "bias"], word: True}
    optimizer = torch.optim.SGD([{"params": [layer.weight, layer.bias], **options}])
    write = optimizer_state(optimizer)[1]
    write({"weight/step": torch.ones(()), "bias/step": torch.ones(())})
    assert {state["step"].device.type for state in optimizer.state.values()} == {"meta"}
    optimizer.param_groups[0][word] = False
    write({"weight/step": torch.ones(())})
    assert optimizer.state[layer.weight]["step"].device.type == "cpu"


def test_optimizer_state_of_an_unknown_parameter_is_refused():
    write = optimizer_state(adam(model()))[1]
    with pytest.raises(InputError, match=r"'7\.weight', unknown here"):
        write({"7.weight/exp_avg": torch.zeros(1)})


def test_restored_optimizer_state_is_a_copy():
    net = model()
    optimizer = adam(net)
    value = torch.zeros(4, 3)
    optimizer_state(optimizer)[1]({"0.weight/exp_avg": value})
    optimizer.state[net[0].weight]["exp_avg"].add_(1)
    assert value.sum() == 0


def test_the_generator_goes_on_where_it_was():
    read, write = random_state()
    saved = copied(read())
    first = torch.rand(3)
    write(saved)
    assert torch.equal(torch.rand(3), first)


def accelerators(monkeypatch, states: list[int], own: int) -> list[int]:
    """Pretend that these are the generators of the accelerators, and one is the process's own."""
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: len(states),
        "current_device": lambda: own,
        "get_rng_state": lambda: torch.tensor(states[own]),
        "get_rng_state_all": lambda: [torch.tensor(state) for state in states],
        "set_rng_state": lambda state, index=own: states.__setitem__(index, state.item()),
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return states


@pytest.mark.parametrize(
    ("visible", "own", "expected"), [(2, 1, [10, 11]), (1, 0, [11]), (3, 2, [10, 11, 11])]
)
def test_the_own_accelerator_s_generator_resumes_whatever_others_are_visible(
    monkeypatch, visible, own, expected
):
    read, write = random_state()
    accelerators(monkeypatch, [10, 11], 1)
    saved = read()
    states = accelerators(monkeypatch, [0] * visible, own)
    write(saved)
    assert states == expected
    del saved["cuda"]  # as older checkpoints are
    states = accelerators(monkeypatch, [0] * visible, own)
    write(saved)
    assert states == [10, 11, 0][:visible]


def test_views_know_what_their_entries_are_laid_out_as():
    net = model()
    optimizer = adam(net)
    steps(net, optimizer, 1)
    for view, of in ((model_view(net), lambda key: key), (optimizer_view(optimizer), parameter_of)):
        parameters = dict(net.named_parameters())
        for key in view.read():
            if of(key) in parameters:
                assert view.like(key) is parameters[of(key)]
    assert model_view(net).like("1.running_mean") is net[1].running_mean
    assert model_view(net).like("9.weight") is None
    assert model_view(net).like("1.eps") is None
    assert optimizer_view(optimizer).like("9.weight/exp_avg") is None


def parameter_of(key: str) -> str:
    return key.rsplit("/", 1)[0]


@pytest.mark.parametrize("name", ["", "a/b", "a#1"])
def test_names_that_would_not_do_on_disk_are_refused(name):
    with pytest.raises(ValueError, match="no '/' and no '#'"):
        StateRegistry().add(name, dict, lambda _: None)


def test_views_may_be_left_out_of_the_check():
    registry = StateRegistry()
    registry.add("mine", dict, lambda _: None)
    registry.check(["other"], skip={"mine", "other"})
    with pytest.raises(InputError, match=r"it holds no state for \['mine'\]$"):
        registry.check(["other"], skip={"other"})
    with pytest.raises(InputError, match=r"it holds state that nobody asks for: \['other'\]$"):
        registry.check(["mine", "other"])


def test_generators_of_other_ranks_give_fresh_ones():
    def drawn(seed: int, rank: int, size: int, saved: list) -> float:
        view = random_view(seed, Ranks(rank, size))
        assert view.per_rank
        view.write(view.regroup(saved))
        return torch.rand(1).item()

    old = [{"cpu": torch.Generator().manual_seed(rank).get_state()} for rank in (0, 1)]
    cases = [(7, 0, 3, old), (7, 1, 3, old), (7, 0, 4, old), (8, 0, 3, old), (7, 0, 3, old[::-1])]
    first = [drawn(*case) for case in cases]
    assert len(set(first)) == len(cases)
    assert [drawn(*case) for case in cases] == first


def across_layouts(ranks: Ranks) -> None:
    """State of a sharded model into a whole one and back, without a checkpoint between."""
    torch.manual_seed(0)
    sharded, plain = nn.Linear(3, 5), nn.Linear(3, 5)
    fully_shard(sharded, mesh=Layout.of(ranks.size, ranks.size).mesh("cpu"))
    optimizers = [adam(net) for net in (sharded, plain)]
    for net, optimizer in zip((sharded, plain), optimizers, strict=True):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter) * 2
        optimizer.step()
    views = [
        (model_view(net), optimizer_view(optimizer))
        for net, optimizer in zip((sharded, plain), optimizers, strict=True)
    ]
    for source, target in (views, views[::-1]):
        for out, into in zip(source, target, strict=True):
            into.write(out.read())
            found, expected = into.read(), out.read()
            assert found.keys() == expected.keys()
            for key, value in found.items():
                assert torch.equal(whole(value), whole(expected[key])), key
                like = into.like(key)
                assert is_sharded(value) == (is_sharded(like) and value.shape == like.shape)
        for parameter in (*sharded.parameters(), *plain.parameters()):
            with torch.no_grad():
                parameter.add_(1)


@pytest.mark.ranks
def test_state_goes_between_whole_and_sharded_parameters(pool):
    pool.run(across_layouts, ranks=2)

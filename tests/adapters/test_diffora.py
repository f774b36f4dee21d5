"""What DiffoRA promises exactly: its gates, its two parts of the data, its plan and its sharing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from modicum.adapters import LoRA, load
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.diffora import DiffoRA
from modicum.adapters.gate_search import GatedLoRA, GateSearch, halves, rows
from modicum.adapters.preparation import Preparation, PreparationContext
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.linears import NF4Linear
from modicum.proofs.contracts.adapters.subjects import (
    assert_close,
    distance,
    llama,
    numbers,
    odd_model,
    stir,
    tokens,
)

VALUE = DiffoRA(rank=2, search_steps=6, search_rate=5e-3, examples=64)
LAYERS, TYPES = 2, 7


def id_batches(count: int = 6, rows: int = 4) -> list[Tensor]:
    """Batches of different examples, whose first token is the batch's number."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randint(29, (rows, 6), generator=generator) for _ in range(count)]
    for number, batch in enumerate(found):
        batch[:, 0] = number
    return found


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    total: Tensor = model(batch[:, :-1]).log_softmax(-1).gather(-1, batch[:, 1:, None]).sum()
    return -total


def searched(value: DiffoRA = VALUE, seed: int = 0, model: nn.Module | None = None) -> Any:
    return value.attach(model or llama(), seed=seed, batches=id_batches(), loss=loss)


def given(value: DiffoRA, private: tuple[str, ...], model: nn.Module) -> AttachedAdapter:
    """The adapter with a plan that is known."""
    plan = {
        site.name: {"lora": "private" if site.name.endswith(private) else "shared"}
        for site in value.sites(model)
    }
    return value.attach(model, prepared=Preparation(plan))


@pytest.mark.parametrize("frozen", [True, False])
def test_gates_of_one_are_lora(frozen: bool) -> None:
    model, plain = llama(), llama()
    adapter, lora = (
        GatedLoRA(rank=2, alpha=4.0).attach(model),
        LoRA(rank=2, alpha=4.0).attach(plain),
    )
    state = stir(lora).state_dict()
    found = dict(adapter.named_parameters())
    with torch.no_grad():
        for name, tensor in state.items():
            found[name].copy_(tensor)
    for name, parameter in found.items():
        parameter.requires_grad_(not (frozen and name.startswith("shared.")))
    assert_close(model(tokens()), plain(tokens()), 1e-6, "outputs")
    for each in (model, plain):
        loss(each, tokens()).backward()
    for name, parameter in lora.named_parameters():
        assert_close(found[name].grad, parameter.grad, 1e-5, name)


def test_the_gradients_of_gates_equal_finite_differences() -> None:
    model = llama().double()
    adapter = stir(GatedLoRA(rank=2).attach(model), 0.3)
    loss(model, tokens()).backward()
    for name, scores in adapter.named_parameters():
        if not name.startswith("shared."):
            continue
        expected = torch.empty_like(scores)
        for at in range(len(scores)):
            values = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    scores[at] += step
                    values.append(loss(model, tokens()))
                    scores[at] -= step
            expected[at] = (values[0] - values[1]) / 2e-5
        torch.testing.assert_close(scores.grad, expected, rtol=1e-4, atol=1e-6)
        assert abs(float(scores.grad.sum())) < 1e-10  # gates compete: what one gains others lose


def test_factors_see_no_example_of_the_gates_and_each_moves_alone() -> None:
    seen: dict[str, set[int]] = {"factors": set(), "gates": set()}
    turns: list[str] = []
    before: dict[str, Tensor] = {}

    def watching(model: nn.Module, batch: Tensor) -> Tensor:
        parameters = dict(model.named_parameters())
        gates = {name for name in parameters if "shared_by_" in name}
        turn = "gates" if any(parameters[name].requires_grad for name in gates) else "factors"
        own = {name for name, parameter in parameters.items() if parameter.requires_grad}
        if before:
            changed = {name for name, was in before.items() if not was.equal(parameters[name])}
            assert changed
            assert changed <= (gates if turns[-1] == "gates" else parameters.keys() - gates)
        before.update({name: parameter.detach().clone() for name, parameter in parameters.items()})
        assert own == gates if turn == "gates" else not own & gates
        seen[turn].update(batch[:, 0].tolist())
        turns.append(turn)
        return loss(model, batch)

    VALUE.attach(llama(), batches=id_batches(), loss=watching)
    assert seen == {"factors": {0, 2, 4}, "gates": {1, 3, 5}}
    assert turns == ["factors"] * 3 + ["gates", "factors"] * 3 + ["gates"]  # a third to warm up


def test_each_block_has_as_many_of_its_own_and_the_same_seed_the_same_plan() -> None:
    adapter, again, other = (searched(VALUE, seed) for seed in (1, 1, 2))
    plan = {name: own["lora"] for name, own in adapter.prepared.values.items()}
    for row in rows(adapter.sites.values()).values():
        assert [plan[site.name] for site in row].count("private") == 2
        assert sum(site.prepared["gate"] for site in row) == pytest.approx(TYPES, rel=1e-5)
    assert adapter.prepared == again.prepared
    assert adapter.prepared != other.prepared


@pytest.mark.parametrize("select", ["rows", "global", "parameters"])
def test_what_is_selected_is_the_best_under_its_budget(select: str) -> None:
    sites = VALUE.sites(llama())
    gates = {site.name: 0.1 + (7 * at % 11) for at, site in enumerate(sites)}
    value = VALUE.with_fields(select=select, rho=0.4)
    found = value.chosen(sites, gates)
    by_name = {site.name: site for site in sites}
    if select == "rows":
        for row in rows(sites).values():
            best = sorted((site.name for site in row), key=gates.__getitem__)[-3:]
            assert found & {site.name for site in row} == set(best)
    elif select == "global":
        assert found == set(sorted(by_name, key=gates.__getitem__)[-6:])
    else:
        numbers_of = {name: s.in_features + s.out_features for name, s in by_name.items()}
        assert sum(map(numbers_of.get, found)) <= 0.4 * sum(numbers_of.values())
        left_out = set(by_name) - found
        spare = 0.4 * sum(numbers_of.values()) - sum(map(numbers_of.get, found))
        assert not any(numbers_of[name] <= spare for name in left_out)


def test_all_of_their_own_is_lora_to_the_bit() -> None:
    model, plain = llama(), llama()
    adapter = DiffoRA(rank=2, rho=1.0).attach(model, seed=3)
    lora = LoRA(rank=2).attach(plain, seed=3)
    own, other = adapter.state_dict(), lora.state_dict()
    assert own.keys() == other.keys()
    assert all(own[name].equal(other[name]) for name in own)
    stir(adapter)
    stir(lora)
    assert model(tokens()).equal(plain(tokens()))


def test_none_of_their_own_is_a_pair_a_kind() -> None:
    adapter = DiffoRA(rank=2, rho=0.0).attach(llama())
    names = [name for name, _ in adapter.named_parameters()]
    assert len(names) == 2 * TYPES
    assert all(name.startswith("shared.") for name in names)
    lora = sum(p.numel() for p in LoRA(rank=2).attach(llama()).parameters())
    assert sum(p.numel() for p in adapter.parameters()) == lora // LAYERS


def test_a_shared_pair_gets_the_sum_of_its_layers_gradients() -> None:
    model, plain = llama(), llama()
    adapter = stir(given(VALUE, ("gate_proj", "q_proj"), model))
    lora = LoRA(rank=2).attach(plain)
    with torch.no_grad():
        for (_, layer), (_, twin) in zip(adapter.layers(), lora.layers(), strict=True):
            a, b, _ = layer.as_lora()
            twin.A.copy_(a)
            twin.B.copy_(b)
    for each in (model, plain):
        loss(each, tokens()).backward()
    pair = adapter.shared.get_parameter("up_proj_24x16_A")
    twins = [layer.A.grad for name, layer in lora.layers() if name.endswith("up_proj")]
    assert len(twins) == LAYERS
    assert_close(pair.grad, sum(twins), 1e-6, "the shared A")
    assert sum(p.numel() for p in adapter.parameters()) == numbers_of(adapter)


def numbers_of(adapter: AttachedAdapter) -> int:
    """rank (in + out), once for each private layer and once a kind for the others."""
    kinds = {
        (site.name if site.prepared["lora"] == "private" else site.suffix): 2
        * (site.in_features + site.out_features)
        for site in adapter.sites.values()
    }
    return sum(kinds.values())


@pytest.mark.parametrize("form", ["modicum", "peft"])
def test_files_have_the_plan_or_plain_lora(form: Any, tmp_path: Path) -> None:
    adapter = stir(searched())
    expected = adapter.model(tokens())
    adapter.save(tmp_path, form=form)
    other = llama()
    again = load(other, tmp_path)
    assert distance(other(tokens()), expected) < (1e-6 if form == "peft" else 1e-12)
    kept = {name: site.prepared for name, site in adapter.sites.items()}
    if form == "modicum":
        assert {name: site.prepared for name, site in again.sites.items()} == kept
        assert len(dict(again.named_parameters())) == len(dict(adapter.named_parameters()))
    else:
        assert type(again.method) is LoRA


def test_layers_that_get_nothing_are_plain_and_a_file_knows_them(tmp_path: Path) -> None:
    few = VALUE.with_fields(
        share=False, rho=0.15
    )  # one of seven, where a part of a row would be none
    adapter = stir(searched(few))
    assert len(adapter.sites) == LAYERS
    plain = [m for m in adapter.model.modules() if type(m) is nn.Linear]
    assert len(plain) == LAYERS * (TYPES - 1) + 1  # the head too
    adapter.save(tmp_path, form="modicum")
    other = llama()
    load(other, tmp_path)
    assert other(tokens()).equal(adapter.model(tokens()))


def test_merged_and_unmerged_with_shared_pairs() -> None:
    adapter = stir(searched())
    expected = adapter.model(tokens())
    adapter.merge()
    assert_close(adapter.model(tokens()), expected, 1e-5, "merged")


def test_on_a_quantized_base_the_search_is_the_same_machinery() -> None:
    weights = [numbers(64, 32, name="one"), numbers(32, 64, name="two")]
    model = nn.Sequential(*(NF4Linear.from_dense(weight) for weight in weights))
    batches = [numbers(8, 32, name=f"batch {at}") for at in range(2)]
    value = VALUE.with_fields(rho=0.5)
    adapter = value.attach(model, batches=batches, loss=lambda m, x: m(x).square().sum())
    assert [own["lora"] for own in adapter.prepared.values.values()].count("private") == 1
    assert all(len(own) == 2 for own in adapter.prepared.values.values())


def test_the_search_leaves_other_adapters_and_half_precision_as_they_were() -> None:
    model = llama().bfloat16()
    first = LoRA(rank=2).attach(model, name="first")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sites = tuple(VALUE.sites(model))
    context = PreparationContext(model, sites, id_batches(), loss)
    gates = GateSearch(LoRA(rank=2), 3, 5e-3, 0.05, 64).run(context)
    assert gates.keys() == {site.name for site in sites}
    assert first.active
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(after[name].equal(tensor) for name, tensor in before.items())


def _gates(ranks: Ranks, batches: list[Tensor]) -> tuple[dict[str, float], dict[str, Any]]:
    model = llama()
    own = batches if ranks.alone else [batch.chunk(ranks.size)[ranks.rank] for batch in batches]
    context = PreparationContext(model, tuple(VALUE.sites(model)), own, loss, ranks)
    found = VALUE.prepare(context).values
    return {name: each["gate"] for name, each in found.items()}, dict(found)


@pytest.mark.ranks
def test_two_ranks_find_the_gates_of_one(pool: Pool) -> None:
    one, _ = _gates(Ranks(), id_batches())
    (gates, plan), (others, same) = pool.run(_gates, id_batches(), ranks=2)
    assert gates == others
    assert plan == same
    assert gates == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "said", "field"),
    [
        ({"rho": 0.0, "share": False}, "selects no layer", "rho"),
        ({"rho": 1.5}, "too large .* at most 1", "rho"),
        ({"rho": -0.1}, "too small .* at least 0", "rho"),
    ],
    ids=str,
)
def test_values_that_cannot_be_are_refused(fields: Any, said: str, field: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        DiffoRA(**fields)
    assert error.value.field == field


def one_batch() -> Iterator[Tensor]:
    batch = id_batches(1)[0]
    yield batch
    yield batch  # the same examples again are no second part


@pytest.mark.parametrize(
    ("value", "batches", "said"),
    [
        (VALUE.with_fields(rho=0.05, share=False), (), "selects no layer"),
        (VALUE, (), "examples of two disjoint parts"),
        (VALUE, one_batch(), "examples of two disjoint parts"),
        (VALUE.with_fields(targets=("embed_tokens",)), id_batches(), "this is an embedding"),
    ],
    ids=["nothing", "none", "one", "embedding"],
)
def test_what_cannot_be_searched_is_refused_and_the_model_left(
    value: DiffoRA, batches: Any, said: str
) -> None:
    model = llama()
    before = model(tokens())
    with pytest.raises(InputError, match=said):
        value.attach(model, batches=batches, loss=loss)
    _untouched(model, before)


def test_a_loss_that_reaches_no_layer_is_refused_and_the_model_left() -> None:
    model, before = llama(), llama()(tokens())
    with pytest.raises(InputError, match="none of the layers takes part in it"):
        VALUE.attach(model, batches=id_batches(), loss=lambda m, b: m(b).detach().sum())
    _untouched(model, before)
    odd = odd_model()
    batches = [numbers(8, 7, name=f"batch {at}") for at in range(2)]
    with pytest.raises(InputError, match="no gradient at this layer") as error:
        VALUE.attach(odd, batches=batches, loss=lambda m, x: m.wide(x).square().sum())
    assert error.value.value == "narrow"
    with pytest.raises(InputError, match="not finite"):
        VALUE.attach(odd, batches=batches, loss=lambda m, x: m(x).sum() * float("nan"))
    assert type(odd.wide) is nn.Linear


def _untouched(model: nn.Module, before: Tensor) -> None:
    assert model(tokens()).equal(before)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("layers_by_adapter" in name for name, _ in model.named_modules())


def test_halves_stop_at_the_limit_and_have_two_in_any_case() -> None:
    batches = [torch.full((4, 1), at) for at in range(5)]
    first, second = halves(copy.deepcopy(batches), 9, Ranks())
    assert [int(each[0]) for each in first] == [0, 2]
    assert [int(each[0]) for each in second] == [1]
    assert [len(each) for each in halves(batches, 1, Ranks())] == [1, 1]

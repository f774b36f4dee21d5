"""One threshold for all spectra: limits, what it may miss by, break-even, and what is trained."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.form_plan import FormPlan, LayerForm
from modicum.core.layers.rank_plan import (
    RankPlan,
    is_factored,
    normalized,
    plan_within,
    plan_without,
    planned_at,
    train_factors_alone,
)

SHAPES = {"flat": (12, 12), "wide": (10, 30), "tall": (40, 8), "steep": (16, 16)}


def spectra(seed: int = 0) -> dict[str, Tensor]:
    """Of random weights, of which one falls much faster than the others."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in SHAPES.items():
        weight = torch.randn(*shape, generator=generator, dtype=torch.float64)
        values = torch.linalg.svdvals(weight)
        steep = torch.exp(-0.5 * torch.arange(len(values)))
        found[name] = values * steep if name == "steep" else values
    return found


def reduced(threshold: float, found: dict[str, Tensor]) -> int:
    return sum(int((normalized(each) < threshold).sum()) for each in found.values())


@given(st.integers(0, 5), st.floats(0.05, 0.6))
def test_the_share_of_values_is_reached_by_the_least_threshold(seed: int, share: float) -> None:
    """The same as the authors' bisection of k on the cached spectra, within one value."""
    found = spectra(seed)
    total = sum(len(each) for each in found.values())
    plan = plan_without(share, found, SHAPES)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if reduced(middle, found) < share * total else (low, middle)
    went = reduced(plan.threshold, found)
    assert went == reduced(high, found) >= share * total - 1e-9
    # Each layer's least value is 0, and so these go together.
    assert went <= max(math.ceil(share * total), len(found)) + 1


@given(st.integers(0, 5), st.floats(0.3, 0.95))
def test_the_elements_are_kept_and_missed_by_less_than_a_rank(seed: int, share: float) -> None:
    found = spectra(seed)
    whole = sum(math.prod(shape) for shape in SHAPES.values())
    plan = plan_within(int(share * whole), found, SHAPES)
    assert plan.dense_elements == whole
    assert plan.elements <= int(share * whole)
    values = torch.cat([normalized(each) for each in found.values()]).unique()
    before = float(values[values < plan.threshold].max())
    more = planned_at(before, found, SHAPES)
    assert more.elements > int(share * whole)
    changed = [n for n in SHAPES if more.layers[n].elements != plan.layers[n].elements]
    assert before == 0 or len(changed) == 1
    assert before == 0 or more.elements - plan.elements <= max(map(sum, SHAPES.values()))


def test_a_higher_threshold_never_leaves_more() -> None:
    found = spectra()
    for rule in ("elements", "half"):
        plans = [planned_at(k / 50, found, SHAPES, rule) for k in range(51)]
        assert plans[0].ranks == {}
        assert plans[0].elements == plans[0].dense_elements
        assert set(plans[-1].ranks.values()) == {1}
        assert set(plans[-1].ranks) == set(SHAPES)
        sizes = [plan.elements for plan in plans]
        assert sizes == sorted(sizes, reverse=True)
    assert reduced(0.0, found) == 0
    assert reduced(1.1, found) == sum(map(len, found.values()))
    with pytest.raises(InputError, match="above 1"):
        planned_at(1.1, found, SHAPES)


@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from(["elements", "half"]),
)
def test_factors_are_never_larger_than_the_weight(m: int, n: int, r: int, rule: str) -> None:
    factored = is_factored(r, (m, n), rule)
    assert not factored or r * (m + n) <= m * n
    if rule == "elements":
        assert factored == (r * (m + n) <= m * n)
    if m == n:
        assert factored == is_factored(r, (m, n), "half")


@pytest.mark.parametrize("times", [4.0, 3.0, 1e-6])
def test_equal_normalized_values_have_equal_ranks(times: float) -> None:
    """Whatever the scale of a weight, and whichever threshold is asked for."""
    one = spectra()["flat"]
    found = {"a": one, "b": times * one, "c": times * spectra(1)["flat"]}
    shapes = dict.fromkeys(found, (12, 12))
    for share in (0.2, 0.4, 0.6, 0.8):
        plan = plan_without(share, found, shapes)
        assert plan.layers["a"] == plan.layers["b"]


def test_each_spectrum_is_measured_from_its_own_least_value() -> None:
    values = torch.tensor([9.0, 5.0, 3.0, 1.0])
    assert torch.equal(normalized(values), normalized(values + 100))
    assert normalized(values).tolist() == [1.0, 0.5, 0.25, 0.0]


def test_a_spectrum_of_equal_values_stays() -> None:
    """No division by zero, and nothing goes; so does a layer that is zero, or has one value."""
    for values in (torch.ones(6), torch.zeros(6), torch.full((6,), 1e-30), torch.ones(1)):
        assert torch.equal(normalized(values), torch.ones(len(values), dtype=torch.float64))
    alike = {"a": torch.ones(6), "b": torch.ones(6)}
    shapes = dict.fromkeys(alike, (6, 6))
    with pytest.raises(InputError, match="of 12 singular values 0 are below"):
        plan_without(0.1, alike, shapes)
    with pytest.raises(InputError, match=r"leave 72 of 72 elements.*whose values are alike"):
        plan_within(60, alike, shapes)


def test_planted_ranks_are_found_at_once() -> None:
    """What is zero but for rounding goes together, and costs nothing."""
    generator = torch.Generator().manual_seed(0)
    found, ranks = {}, {"a": 3, "b": 5, "c": 16}
    for name, rank in ranks.items():
        one = torch.randn(16, rank, generator=generator, dtype=torch.float64)
        other = torch.randn(rank, 16, generator=generator, dtype=torch.float64)
        found[name] = torch.linalg.svdvals(one @ other)
    shapes = dict.fromkeys(found, (16, 16))
    plan = plan_without(0.3, found, shapes)
    assert plan.ranks == {"a": 3, "b": 5}
    assert plan.layers["c"].rank is None
    assert not plan.layers["c"].trained
    assert plan.elements == 8 * 32 + 256
    assert plan.trained_elements == 8 * 32


def test_it_comes_back_from_plain_values() -> None:
    plan = plan_within(800, spectra(), SHAPES, "half")
    raw = plan.as_json()
    assert RankPlan.from_json(raw) == plan
    assert {one["rank"] for one in raw["layers"].values() if not one["trained"]} == {"dense"}
    for wrong in ({}, {"threshold": 1.0, "layers": {"a": {}}}, [], {"threshold": 0, "layers": 3}):
        with pytest.raises(InputError, match="a plan of ranks has a threshold"):
            RankPlan.from_json(wrong)


def test_forms_extend_a_plan() -> None:
    within = FormPlan().with_form("other", "low_rank", rank=2)
    plan = planned_at(0.2, spectra(), SHAPES)
    forms = plan.forms(within).layers
    assert forms["other"] == LayerForm("low_rank", {"rank": 2})
    assert {n: f.arguments["rank"] for n, f in forms.items() if n != "other"} == plan.ranks


def test_only_factors_are_trained_and_what_was_frozen_stays_so() -> None:
    from modicum.linears import LowRank

    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].requires_grad_(False)
    formed = LowRank(rank=2, targets=("0", "2")).convert(model)
    train_factors_alone(model, formed.layers)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"0.down", "0.up"}
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 2
    assert all(p.grad is None for n, p in model.named_parameters() if n not in trained)

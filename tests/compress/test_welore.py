"""WeLore: planted ranks, bounds, equal spectra, what trains, files, and what is refused."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Literal

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from modicum.compress import Calibration, CompressedModel, WeLore, load
from modicum.compress.base import CompressorQuery
from modicum.core.contracts.ledger import ModelQuery
from modicum.core.contracts.method import Context
from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import full_weight
from modicum.core.layers.rank_plan import RankPlan, normalized
from modicum.core.ranks.ranks import Ranks

RANKS = {"1": 3, "3": 5}  # of the layers that are low-rank; the others are random
SHAPES = {"0": (24, 16), "1": (24, 24), "2": (20, 24), "3": (32, 20), "4": (9, 32)}


def planted() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(nn.Linear(ins, outs) for outs, ins in SHAPES.values()))
    with torch.no_grad():
        for name, (outs, ins) in SHAPES.items():
            layer, rank = model.get_submodule(name), RANKS.get(name, ins)
            one = torch.randn(outs, rank, generator=generator, dtype=torch.float64)
            other = torch.randn(rank, ins, generator=generator, dtype=torch.float64)
            layer.weight.copy_(one @ other / math.sqrt(rank * ins))
            layer.bias.normal_(generator=generator)
    return model.double()


def fitted(model: nn.Module, value: WeLore) -> CompressedModel:
    handle = value.fit(model, value.calibrate(model))
    assert isinstance(handle, CompressedModel)
    return handle


def exact() -> nn.Sequential:
    """The same with what is low-rank to the last digit, as fp32 leaves none."""
    model = planted()
    with torch.no_grad():
        for name, rank in RANKS.items():
            weight = model.get_submodule(name).weight
            left, values, right = torch.linalg.svd(weight, full_matrices=False)
            weight.copy_(left[:, :rank] * values[:rank] @ right[:rank])
    return model


def test_planted_ranks_are_found_and_the_rest_is_untouched() -> None:
    model, inputs = exact(), torch.randn(7, 16, dtype=torch.float64)
    before, weights = model(inputs), {n: p.clone() for n, p in model.named_parameters()}
    whole = sum(math.prod(shape) for shape in SHAPES.values())
    least = whole - sum(math.prod(SHAPES[n]) - r * sum(SHAPES[n]) for n, r in RANKS.items())
    handle = fitted(model, WeLore(share=(least + 1) / whole))
    assert {n: f.arguments["rank"] for n, f in handle.plan.layers.items()} == RANKS
    torch.testing.assert_close(model(inputs), before, rtol=1e-5, atol=1e-6)
    for name in SHAPES.keys() - RANKS.keys():
        assert torch.equal(model.get_submodule(name).weight, weights[f"{name}.weight"])
    report = handle.report
    assert report is not None
    after = sum(8 * r * sum(SHAPES[n]) for n, r in RANKS.items())
    assert (report.bytes_before, report.bytes_after) == (8 * (24 * 24 + 32 * 20), after)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("rule", ["elements", "half"])
def test_no_layer_grows_and_the_share_is_kept(share: float, rule: str) -> None:
    model = planted()
    whole = sum(math.prod(shape) for shape in SHAPES.values())
    handle = fitted(model, WeLore(share=share, rule=rule))
    there = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert there <= share * whole
    for name, form in handle.plan.layers.items():
        rank = int(form.arguments["rank"])
        assert rank * sum(SHAPES[name]) <= math.prod(SHAPES[name])
        assert rule == "elements" or rank <= min(SHAPES[name]) / 2
        row = next(row for row in handle.report.layers if row.name == name)  # type: ignore[union-attr]
        dropped = torch.linalg.svdvals(planted().get_submodule(name).weight)[rank:]
        assert row.error == pytest.approx(dropped.square().sum().item(), rel=1e-9, abs=1e-18)


def test_the_papers_target_is_a_share_of_all_singular_values() -> None:
    model = planted()
    value = WeLore(reduction=0.5)
    calibration = value.calibrate(model)
    plan = value.ranks(value.bind(Context(model)).layers, calibration)
    spectra = [calibration.sums["spectrum", name] for name in SHAPES]
    went = sum(int((normalized(each) < plan.threshold).sum()) for each in spectra)
    asked = 0.5 * sum(map(len, spectra))
    assert asked <= went <= asked + 1


def test_only_factors_have_gradients_and_state() -> None:
    model = planted()
    handle = fitted(model, WeLore(share=0.7))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{n}.{key}" for n in handle.plan.layers for key in ("down", "up")}
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        model(torch.randn(4, 16, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    assert len(optimizer.state) == len(trained)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name not in trained)
        assert torch.equal(before[name], parameter) == (name not in trained)
    everything = planted()
    fitted(everything, WeLore(share=0.7, train="all"))
    assert all(parameter.requires_grad for parameter in everything.parameters())


def test_before_the_spectra_are_known_it_counts_the_most_there_may_be() -> None:
    value, at = WeLore(share=0.4), ModelQuery(2, 5)
    bare = planted().to("meta")
    bound = value.bind(Context(bare))
    handle = fitted(planted(), value)
    assert bound.layers.keys() >= handle.layers.keys()
    for name, layer in handle.layers.items():
        most, now = value.trained(bound.layers[name]), value.trained(layer)
        assert now <= most <= layer.elements
        spent = [value.ledger(CompressorQuery(each, at)) for each in (bound.layers[name], layer)]
        for kind in ("weight", "activation"):
            assert spent[0].bytes(kind) >= spent[1].bytes(kind)


def test_a_file_keeps_the_plan(tmp_path: Path) -> None:
    model, inputs = planted(), torch.randn(3, 16, dtype=torch.float64)
    handle = fitted(model, WeLore(share=0.7))
    folder = handle.save(tmp_path / "small")
    other = planted()
    loaded = load(other, folder)
    assert loaded.plan == handle.plan
    assert torch.equal(other(inputs), model(inputs))
    raw = json.loads(json.dumps(handle.facts()))["ranks"]
    plan = RankPlan.from_json(raw)
    assert plan.ranks == {n: f.arguments["rank"] for n, f in handle.plan.layers.items()}
    assert set(raw["layers"]) == set(SHAPES)
    assert all(one["trained"] == (one["rank"] != "dense") for one in raw["layers"].values())


def test_spectra_serve_other_sizes_and_come_from_the_cache(tmp_path: Path) -> None:
    model = planted()
    calibration = WeLore().calibrate(model, cache=tmp_path / "bases")
    assert len(list((tmp_path / "bases").iterdir())) == len(SHAPES)
    again = WeLore().calibrate(planted(), cache=tmp_path / "bases")
    for key, values in calibration.sums.items():
        assert torch.equal(values, again.sums[key])
    stored = Calibration.load(calibration.save(tmp_path / "spectra.safetensors"))
    bytes_after = []
    for share in (0.3, 0.5, 0.8):
        one, other = (WeLore(share=share).fit(planted(), c) for c in (calibration, stored))
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name])
        bytes_after.append(sum(p.nbytes for p in one.model.parameters()))
    assert bytes_after == sorted(bytes_after)


def test_names_choose_layers_whose_projections_are_fused() -> None:
    """A fused projection is one matrix with one spectrum; transposed ones are as their weight."""
    model = planted()
    fused = {"targets": ("1", "3"), "share": 0.6}
    handle = fitted(model, WeLore(**fused))
    assert set(handle.plan.layers) <= {"1", "3"}
    product = full_weight(model.get_submodule("1"))
    assert product.shape == SHAPES["1"]


def test_what_cannot_be_done_is_refused_with_a_sentence() -> None:
    model = planted()
    value = WeLore(share=0.02)
    spectra = value.calibrate(model)
    with pytest.raises(InputError, match=r"share.*largest singular values alone leave"):
        value.fit(model, spectra)
    with pytest.raises(InputError, match="no spectrum of this layer; calibrate with WeLore"):
        WeLore().fit(model, Calibration({}, 0, {}))
    value = WeLore(reduction=0.05)
    spectra = value.calibrate(model)
    with pytest.raises(InputError, match="every layer's factors would be larger"):
        value.fit(model, spectra)
    with torch.no_grad():
        model.get_submodule("2").weight[0, 0] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        value.calibrate(model)
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    with pytest.raises(InputError, match="used by another layer too"):
        WeLore(targets=("0",)).plan(tied)


def test_flat_spectra_stay_dense() -> None:
    """A layer whose singular values are alike keeps them all; one that has any low-rank goes."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    with torch.no_grad():
        nn.init.orthogonal_(model[0].weight)
        model[1].weight.copy_(torch.randn(16, 2) @ torch.randn(2, 16))
    handle = fitted(model.double(), WeLore(share=0.7))
    assert set(handle.plan.layers) == {"1"}


@pytest.mark.ranks
def test_ranks_share_the_spectra_and_end_with_the_same_bits(pool: Pool) -> None:
    alone = _bits(Ranks())
    for found in pool.run(_bits, ranks=2):
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[name], alone[name]) for name in alone)


def _bits(ranks: Ranks) -> dict[str, Tensor]:
    model, value = planted(), WeLore(share=0.6)
    handle = value.fit(model, value.calibrate(model, ranks=ranks), ranks=ranks)
    return dict(handle.state_dict())


@pytest.mark.parametrize("train", ["factors", "all"])
def test_the_work_is_that_of_what_is_trained(train: Literal["factors", "all"]) -> None:
    def work(model: nn.Module) -> tuple[int, int]:
        inputs = torch.randn(7, 16, dtype=torch.float64, requires_grad=True)
        with FlopCounterMode(display=False) as forward:
            out = model(inputs)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        return forward.get_total_flops(), backward.get_total_flops()

    dense, model = work(planted()), planted()
    handle = fitted(model, WeLore(share=0.7, train=train))
    said, now = handle.ledger(ModelQuery(1, 7)), work(model)
    assert 0 < len(handle.layers) < len(SHAPES)
    for phase, before, after in zip(("forward", "backward"), dense, now, strict=True):
        assert after - before == said.flops(phase)  # type: ignore[arg-type]

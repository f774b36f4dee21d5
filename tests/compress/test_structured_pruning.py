"""What units are worth, by hand; which go; what is refused; files, several ranks, other models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn

from modicum.compress import PrunedModel, StructuredPruning, load
from modicum.core.contracts.method import Context
from modicum.core.errors import InputError
from modicum.core.layers.calibration import Calibration
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.map import map_of
from modicum.core.ranks.ranks import Ranks
from modicum.proofs.contracts.adapters.subjects import tokens
from modicum.proofs.contracts.compress.subjects import calibrated, compressed, llama, next_token

BLOCK = "model.layers.0"


def kept_of(handle: PrunedModel) -> dict[str, dict[str, list[int]]]:
    assert handle.reduction is not None
    return handle.reduction.as_json()


def pruned(model: nn.Module | None = None, **fields: Any) -> PrunedModel:
    handle = compressed(StructuredPruning(**fields), model)
    assert isinstance(handle, PrunedModel)
    return handle


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_first_order_worths_are_sums_of_weights_times_gradients(kv_heads: int) -> None:
    model = llama(kv_heads=kv_heads)
    value = StructuredPruning(neurons=0.5, groups=0.5)
    calibration = calibrated(value, model)
    assert calibration.examples == 6
    (next_token(model, tokens(4)) + next_token(model, tokens(2, 9))).backward()

    def change(name: str) -> Tensor:
        weight = model.get_parameter(f"{BLOCK}.{name}.weight")
        assert weight.grad is not None
        return (weight * weight.grad).abs().detach()

    block = map_of(model).blocks[0]
    found = value.worth(model, block.mlps[0].neurons, calibration, 0)
    expected = change("mlp.gate_proj").sum(1) + change("mlp.up_proj").sum(1)
    expected += change("mlp.down_proj").sum(0)
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-6)
    found = value.worth(model, block.attentions[0].groups, calibration, 0)
    names = [f"self_attn.{side}_proj" for side in "qkv"]
    expected = sum(change(name).sum(1).view(kv_heads, -1).sum(1) for name in names)
    expected = expected + change("self_attn.o_proj").sum(0).view(kv_heads, -1).sum(1)
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-6)


def test_magnitudes_are_products_of_norms_which_scales_do_not_change() -> None:
    model = llama()
    value, neurons = StructuredPruning(score="magnitude"), map_of(model).blocks[0].mlps[0].neurons
    found = value.worth(model, neurons, Calibration({}, 0, {}), 0)
    weights = [model.get_parameter(f"{BLOCK}.mlp.{side}_proj.weight") for side in ("gate", "up")]
    down = model.get_parameter(f"{BLOCK}.mlp.down_proj.weight")
    expected = weights[0].norm(dim=1) * weights[1].norm(dim=1) * down.norm(dim=0)
    torch.testing.assert_close(found.float(), expected.detach(), rtol=1e-5, atol=0)
    with torch.no_grad():
        weights[1].mul_(8.0)
        down.div_(8.0)
    again = value.worth(model, neurons, Calibration({}, 0, {}), 0)
    torch.testing.assert_close(again, found, rtol=1e-6, atol=0)


def test_units_that_do_nothing_go_first() -> None:
    for score in ("first_order", "magnitude"):
        model = llama()
        dead = [1, 5, 8, 13, 20, 23]
        with torch.no_grad():
            model.get_parameter(f"{BLOCK}.mlp.down_proj.weight")[:, dead] = 0.0
            model.get_parameter(f"{BLOCK}.mlp.up_proj.weight")[dead] = 0.0
        handle = pruned(model, score=score, neurons=0.25)
        kept = kept_of(handle)[f"{BLOCK}.mlp"]["neurons"]
        assert kept == [place for place in range(24) if place not in dead]


def test_random_units_are_a_function_of_the_seed_and_look_at_no_data() -> None:
    value = StructuredPruning(score="random", neurons=0.5)
    nothing = value.calibrate(llama(), iter(()), next_token)
    chosen = []
    for seed in (0, 0, 1):
        handle = value.bind(Context(llama(), seed))
        handle.fit(nothing)
        chosen.append(kept_of(handle))
    assert chosen[0] == chosen[1] != chosen[2]
    assert chosen[0][f"{BLOCK}.mlp"] != chosen[0]["model.layers.1.mlp"]


def test_widths_are_those_that_were_asked_for() -> None:
    for fields, widths in (
        ({"neurons": 0.3, "multiple": 8}, {"mlp_width": 24}),
        ({"neurons": 0.4, "multiple": 8}, {"mlp_width": 16}),
        ({"neurons": 0.99}, {"mlp_width": 1}),
        ({"neurons": 0.0, "groups": 0.5}, {"heads": 2, "kv_heads": 1}),
    ):
        value = StructuredPruning(**fields)
        try:
            blocks = value.plan(llama("meta")).blocks
        except InputError:
            assert widths == {"mlp_width": 24}  # what would not become smaller is refused
            continue
        assert {name: own.widths for name, own in blocks.items()} == {
            BLOCK: widths, "model.layers.1": widths
        }  # fmt: skip


def test_it_extends_a_plan_and_respects_widths_that_are_there() -> None:
    forms = FormPlan().with_block(BLOCK, mlp_width=12)
    model = llama("meta", forms=forms)
    extended = StructuredPruning(neurons=0.5).plan(model, model.config.forms)
    assert extended.block(BLOCK).mlp_width == 6
    assert extended.block("model.layers.1").mlp_width == 12


def test_the_report_says_what_became_of_each_part() -> None:
    said: list[tuple[int, int | None]] = []
    model, value = llama(), StructuredPruning(neurons=0.25, groups=0.5)
    before = sum(p.nbytes for n, p in model.named_parameters() if "_proj" in n)
    calibration = calibrated(value, model)
    handle = value.fit(model, calibration, progress=lambda done, total: said.append((done, total)))
    assert said == [(1, 4), (2, 4), (3, 4), (4, 4)]
    report = handle.report
    assert report is not None
    assert report.bytes_before == before
    assert report.bytes_after == sum(p.nbytes for n, p in model.named_parameters() if "_proj" in n)
    row = report.parts[1]
    assert (row.name, row.kind, row.units, row.kept) == (f"{BLOCK}.mlp", "neurons", 24, 18)
    assert 0.75 < row.worth < 1
    assert json.loads(json.dumps(report.as_json()))["parts"][0]["kind"] == "groups"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"neurons": 0.0}, "neither neurons nor groups"),
        ({"groups": 0.3}, "no block loses groups"),
        ({"neurons": 0.01}, "no block loses neurons"),
        ({"first_blocks": 1, "last_blocks": 1}, "no block loses neurons"),
    ],
)
def test_what_makes_nothing_smaller_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        StructuredPruning(**fields).plan(llama("meta"))


def test_what_cannot_be_pruned_is_refused_and_left_alone() -> None:
    with pytest.raises(InputError, match="loses neurons"):
        StructuredPruning().plan(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    model = llama()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    value = StructuredPruning()
    with pytest.raises(InputError, match="knows no changes"):
        value.fit(model, Calibration({}, 0, {}))
    calibration = calibrated(value, model)
    key = next(iter(calibration.sums))
    calibration.sums[key].fill_(float("nan"))
    with pytest.raises(InputError, match="not finite"):
        value.fit(model, calibration)
    with pytest.raises(InputError, match="no memory"):
        value.fit(llama("meta"), calibration)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert model.config == llama().config


def test_a_small_model_is_not_pruned_again_by_the_same_handle(tmp_path: Path) -> None:
    handle = pruned(score="magnitude")
    for again in (handle.wrap, lambda: handle.fit(Calibration({}, 0, {}))):
        with pytest.raises(InputError, match="removed already"):
            again()
    handle.save(tmp_path / "small")
    loaded = load(llama(), tmp_path / "small")
    assert isinstance(loaded, PrunedModel)
    assert kept_of(loaded) == kept_of(handle)
    loaded.merge()
    assert loaded.model.config == llama().config
    with pytest.raises(InputError, match="chosen before"):
        loaded.fit(Calibration({}, 0, {}))
    wrapped = StructuredPruning().wrap(llama("meta"))
    with pytest.raises(InputError, match="not known"):
        wrapped.merge()
    about = json.loads((tmp_path / "small" / "compressed.json").read_text())
    about["forms"]["blocks"][BLOCK]["mlp_width"] = 99
    (tmp_path / "small" / "compressed.json").write_text(json.dumps(about))
    with pytest.raises(InputError, match="another model"):
        load(llama(), tmp_path / "small")


def fitted(ranks: Ranks) -> dict[str, Tensor]:
    model, value = llama(), StructuredPruning(neurons=0.4, groups=0.5)
    mine = [tokens(4), tokens(2, 9), tokens(3, 5), tokens(1, 7)][ranks.rank :: ranks.size]
    calibration = value.calibrate(model, mine, next_token, ranks=ranks)
    handle = value.fit(model, calibration, ranks=ranks)
    return {**handle.state_dict(), "examples": torch.tensor(calibration.examples)}


@pytest.mark.ranks
def test_ranks_choose_the_same_units_as_one(pool: Pool) -> None:
    alone = fitted(Ranks())
    assert alone["examples"] == 10
    for found in pool.run(fitted, ranks=2):
        for name, value in alone.items():
            assert torch.equal(found[name], value), name


def test_gpt2s_fused_and_transposed_layers_lose_units() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=29, n_embd=16, n_layer=2, n_head=4, n_positions=32, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = transformers.GPT2LMHeadModel(config).eval(), tokens()

    def loss(of: nn.Module, ids: Tensor) -> Tensor:
        logits = of(ids[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    value = StructuredPruning(neurons=0.5, groups=0.5)
    calibration = value.calibrate(model, [ids], loss)
    loss(model, ids).backward()
    weight = model.transformer.h[0].mlp.c_fc.weight
    change = (weight * weight.grad).abs().sum(0) if weight.grad is not None else torch.empty(0)
    found = calibration.sums["change of columns", "transformer.h.0.mlp.c_fc"]
    torch.testing.assert_close(found.float(), change.detach(), rtol=1e-4, atol=1e-7)
    handle = value.fit(model, calibration)
    assert tuple(model.transformer.h[0].attn.c_attn.weight.shape) == (16, 24)
    outputs = model(ids).logits
    handle.merge()
    torch.testing.assert_close(model(ids).logits, outputs, rtol=1e-5, atol=1e-5)
    assert tuple(model.transformer.h[0].attn.c_attn.weight.shape) == (16, 48)

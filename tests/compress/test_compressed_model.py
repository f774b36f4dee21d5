"""The handle on a compressed model: fitting, several ranks, shared blocks, other libraries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn

from modicum.compress import FWSVD, Calibration, CompressedModel, load
from modicum.compress.files import DESCRIPTION
from modicum.core.errors import InputError
from modicum.core.layers import basis_cache
from modicum.core.layers.form_plan import FormPlan, LayerForm
from modicum.core.layers.linear_forms import full_weight
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.linears import LowRankLinear
from modicum.parallel.replicated import Replicated
from modicum.parallel.sharded import Sharded
from modicum.proofs.contracts.adapters.subjects import tokens
from modicum.proofs.contracts.compress.subjects import calibrated, compressed, llama, next_token


def shared() -> nn.Sequential:
    """One block used twice, then another with its own weights."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(block, block, nn.Linear(8, 8))


def batches() -> list[Tensor]:
    return [torch.randn(16, 8, generator=torch.Generator().manual_seed(0))]


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def test_a_block_that_is_used_twice_takes_one_pair_of_factors(tmp_path: Path) -> None:
    model = shared()
    value = FWSVD(rank=2)
    handle = value.fit(model, value.calibrate(model, batches(), square))
    two = LayerForm("low_rank", {"rank": 2})
    assert handle.plan.layers == {"0.0": two, "2": two}
    assert isinstance(model[0][0], LowRankLinear)
    assert model[1][0] is model[0][0]
    outputs = model(batches()[0])
    handle.save(tmp_path / "model")
    again = shared()
    twin = load(again, tmp_path / "model")
    assert twin.plan == handle.plan
    assert again[1][0] is again[0][0]
    assert torch.equal(again(batches()[0]), outputs)
    handle.merge()
    assert model[1][0] is model[0][0]
    assert torch.allclose(model(batches()[0]), outputs, atol=1e-6)


def test_fitting_says_how_far_it_is_and_what_it_did() -> None:
    told: list[tuple[int, int | None]] = []
    model = shared()
    value = FWSVD(rank=2)
    calibration = value.calibrate(model, batches(), square)
    weight = model[2].weight.detach().double()
    handle = value.fit(model, calibration, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]
    report = handle.report
    assert report is not None
    row = report.layers[1]
    assert (row.name, row.bytes_before, row.bytes_after) == ("2", 256, 128)
    assert row.form.as_json() == {"form": "low_rank", "rank": 2}
    metric = value.metric(handle.layers["2"], calibration)
    values = torch.linalg.svdvals(weight * metric.sqrt())
    assert row.error == pytest.approx(values[2:].square().sum().item(), rel=1e-9)
    assert row.relative_error == pytest.approx(row.error / values.square().sum().item(), rel=1e-9)
    assert report.as_json()["bytes_after"] == 256
    json.dumps(report.as_json())


def test_decompositions_are_kept_for_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared()
    calibration = FWSVD(rank=2).calibrate(model, batches(), square)
    FWSVD(rank=2).fit(model, calibration, cache=tmp_path)
    expected, other = shared(), shared()
    FWSVD(rank=3).fit(expected, calibration)
    monkeypatch.setattr(basis_cache, "truncated_svd", None)
    FWSVD(rank=3).fit(other, calibration, cache=tmp_path)
    for one, two in zip(expected.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_fitted_model_is_not_fitted_again(tmp_path: Path) -> None:
    model = shared()
    value = FWSVD(rank=2)
    calibration = value.calibrate(model, batches(), square)
    handle = value.fit(model, calibration)
    with pytest.raises(InputError, match="another form already"):
        handle.wrap()
    with pytest.raises(InputError, match="no dense linear layer"):
        value.fit(model, calibration)
    handle.save(tmp_path)
    with pytest.raises(InputError, match="were fitted before"):
        CompressedModel(shared(), FormPlan().with_form("2", "low_rank", rank=2)).fit(calibration)
    bare = llama("meta")
    with pytest.raises(InputError, match="this model has no memory"):
        FWSVD(rank=2).fit(bare, Calibration({}, 1, {}))


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = shared()
    value = FWSVD(rank=2)
    calibration = value.calibrate(model, batches(), square)
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"values that are not finite \(found: '2'\)"):
        value.fit(model, calibration)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    model, folder = shared(), tmp_path / "mine"
    value = FWSVD(rank=2)
    handle = value.fit(model, value.calibrate(model, batches(), square))
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds other files too, which the model's") as error:
        handle.save(folder)
    assert error.value.value == "notes.txt"
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    for _ in range(2):  # a compressed model replaces another
        load(shared(), handle.save(tmp_path / "model"))


def test_folders_of_other_models_are_refused(tmp_path: Path) -> None:
    model = shared()
    value = FWSVD(rank=2)
    value.fit(model, value.calibrate(model, batches(), square)).save(tmp_path / "model")
    with pytest.raises(InputError, match="no compressed model"):
        load(shared(), tmp_path / "nowhere")
    with pytest.raises(InputError, match="another model"):
        load(nn.Sequential(nn.Linear(8, 8)), tmp_path / "model")
    with pytest.raises(InputError, match="another model"):
        load(
            nn.Sequential(*[nn.Sequential(nn.Linear(4, 4))] * 2, nn.Linear(8, 8)),
            tmp_path / "model",
        )
    about = json.loads((tmp_path / "model" / DESCRIPTION).read_text())
    assert about["forms"]["layers"]["0.0"] == {"form": "low_rank", "rank": 2}
    assert about["method"]["name"] == "fwsvd"
    (tmp_path / "model" / DESCRIPTION).write_text("[]")
    with pytest.raises(InputError, match="no compressed model"):
        load(shared(), tmp_path / "model")


def test_closed_it_keeps_its_factors() -> None:
    handle = compressed(FWSVD(rank=2))
    before = handle.model(tokens())
    handle.close()
    assert torch.equal(handle.model(tokens()), before)


def test_gpt2s_transposed_layers_take_factors_and_come_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=29, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = tokens()

    def loss(of: nn.Module, ids: Tensor) -> Tensor:
        logits = of(ids[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    weight = model.transformer.h[0].mlp.c_fc.weight.detach().clone()
    value = FWSVD(share=0.8)
    calibration = value.calibrate(model, [ids], loss)
    handle = value.fit(model, calibration)
    assert set(handle.layers) == {
        f"transformer.h.0.{name}"
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert model.lm_head.weight is model.transformer.wte.weight
    fitted = full_weight(model.transformer.h[0].mlp.c_fc)
    assert fitted.shape == (64, 16)
    assert (fitted.T - weight).norm() < 0.5 * weight.norm()
    logits = model(ids).logits
    handle.save(tmp_path / "small")
    again = transformers.GPT2LMHeadModel(config).eval()
    load(again, tmp_path / "small")
    assert torch.equal(again(ids).logits, logits)
    assert again.lm_head.weight is again.transformer.wte.weight
    handle.merge()
    assert type(model.transformer.h[0].mlp.c_fc).__name__ == "Conv1D"
    model.save_pretrained(tmp_path / "dense")
    dense = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "dense").eval()
    assert (dense(ids).logits - logits).abs().max() < 1e-5


def fitted(ranks: Ranks) -> dict[str, Tensor]:
    model = llama()
    value = FWSVD(share=0.6)
    mine = [tokens(4), tokens(2, 9), tokens(3, 5), tokens(1, 7)][ranks.rank :: ranks.size]
    calibration = value.calibrate(model, mine, next_token, ranks=ranks)
    handle = value.fit(model, calibration, ranks=ranks)
    assert handle.report is not None
    errors = torch.tensor([row.error for row in handle.report.layers], dtype=torch.float64)
    return handle.state_dict() | {"errors": errors}


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_work_and_end_with_the_same_bits(pool: Pool, ranks: int) -> None:
    alone = fitted(Ranks())
    everybody = pool.run(fitted, ranks=ranks)
    for found in everybody:
        for name, value in alone.items():
            assert torch.equal(found[name], everybody[0][name]), name
            assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-5), name


def recovered(ranks: Ranks, kind: str) -> dict[str, Tensor]:
    """Fitted alone, then trained on together: three steps of AdamW on halves of a batch."""
    source = compressed(FWSVD(share=0.6))
    model = llama("meta")
    FWSVD(share=0.6).wrap(model)
    strategy = (
        Replicated(ranks, Layout.of(ranks.size), bucket_bytes=2000)
        if kind == "ddp"
        else Sharded(ranks, Layout.of(ranks.size, ranks.size), reshard_after_forward=True)
    )
    from modicum.core.layers.meta import materialise
    from modicum.core.ranks.sharding import own_part, whole

    strategy.cut(model, model.blocks, torch.device("cpu"))
    materialise(model, "cpu")
    weights = dict(source.model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part, before = own_part(parameter)
            part.copy_(weights[name][before : before + part.shape[0]])
    strategy.start(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        ids = tokens(4, 6 + step)
        strategy.before_backward(last=True)
        next_token(model, ids.chunk(ranks.size)[ranks.rank]).backward()
        strategy.after_backward()
        strategy.update(optimizer)
        optimizer.zero_grad()
    strategy.rest(model)
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_recovery_on_two_ranks_is_that_of_one(pool: Pool, kind: str) -> None:
    alone = compressed(FWSVD(share=0.6)).model
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for step in range(3):
        next_token(alone, tokens(4, 6 + step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in pool.run(recovered, kind, ranks=2):
        for name, value in alone.named_parameters():
            assert torch.allclose(found[name], value, rtol=1e-3, atol=2e-4), name


def test_autocast_trains_fp32_factors_in_bf16() -> None:
    handle = compressed(FWSVD(share=0.6))
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_token(handle.model, tokens())
    loss.backward()
    for name, parameter in handle.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name


def test_a_damped_fit_uses_the_same_pass_as_an_undamped_one() -> None:
    model = llama()
    calibration = calibrated(FWSVD(share=0.6), model)
    one = FWSVD(share=0.6, damping=0.0).fit(llama(), calibration)
    other = FWSVD(share=0.6, damping=1.0).fit(llama(), calibration)
    assert one.report is not None
    assert other.report is not None
    assert one.report.error < other.report.error

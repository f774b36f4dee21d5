"""Two points in a loop of one's own: MeZO's equations, streams, logs, ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn

from modicum.core.draws import fill_
from modicum.core.errors import InputError
from modicum.core.random import normal_
from modicum.core.ranks.ranks import Ranks
from modicum.models import ModelConfig, create
from modicum.optim.streamed_two_point import StreamedTwoPoint
from modicum.optim.two_point import TwoPoint

CONFIG = ModelConfig(vocabulary_size=19, width=12, layers=4, heads=2, mlp_width=20, context=8)


def rows(count: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(19, (count, 9), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, batch: Tensor) -> float:
    return float(F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()))


def trained(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def run(training: TwoPoint, model: nn.Module, steps: int = 5) -> None:
    for step in range(1, steps + 1):
        training.update(step, 1e-2, lambda seed=step: loss_of(model, rows(seed=seed)))  # type: ignore[misc]
    training.flush()


def same(one: nn.Module, other: nn.Module) -> bool:
    others = dict(other.named_parameters())
    return all(torch.equal(value, others[name]) for name, value in one.named_parameters())


def test_it_is_mezo_as_the_paper_writes_it():
    model, theirs = create(CONFIG, seed=0), create(CONFIG, seed=0)
    decays = dict.fromkeys(trained(model), 0.1)
    training = TwoPoint(trained(model), seed=4, decays=decays)
    run(training, model)

    def perturb(step: int, scale: float) -> None:
        for name, value in theirs.named_parameters():
            z = fill_(torch.empty_like(value), seed=4, name=f"{name}/0", step=step)
            value.data = value.data + scale * z

    with torch.no_grad():
        for step in range(1, 6):
            perturb(step, 1e-3)
            up = loss_of(theirs, rows(seed=step))
            perturb(step, -2e-3)
            down = loss_of(theirs, rows(seed=step))
            perturb(step, 1e-3)
            slope = (up - down) / 2e-3
            for value in theirs.parameters():
                value.data = value.data * (1 - 1e-2 * 0.1)
            perturb(step, -1e-2 * slope)
    for name, value in theirs.named_parameters():
        assert torch.allclose(trained(model)[name], value, atol=1e-6)
    assert len(training.log) == 5


def test_a_linear_loss_has_its_projected_gradient_exactly():
    weight, gradient = torch.zeros(30, dtype=torch.float64), torch.arange(30).double() / 7
    training = TwoPoint({"w": weight}, seed=0, perturbations=3, epsilon=0.5)
    found = training.estimate(2, lambda: float(gradient @ weight))
    for k, slope in enumerate(found.slopes):
        z = fill_(torch.empty_like(weight), seed=0, name=f"w/{k}", step=2)
        assert slope == pytest.approx(float(gradient @ z), rel=1e-12)
    assert found.norm == pytest.approx(math.sqrt(sum(s * s for s in found.slopes) / 3))


@pytest.mark.parametrize("draw", ["normal", "rademacher"])
def test_the_estimate_is_unbiased(draw):
    # 50 parameters, 20,000 directions: the mean of slope z against autograd's gradient.
    weight = normal_(torch.empty(10, 5, dtype=torch.float64), seed=0, name="w").requires_grad_()
    inputs = normal_(torch.empty(16, 5, dtype=torch.float64), seed=1, name="x")

    def loss() -> Tensor:
        return (inputs @ weight.T).tanh().square().mean()

    loss().backward()
    assert weight.grad is not None
    training = TwoPoint({"w": weight}, seed=0, perturbations=20_000, draw=draw, snapshot=True)
    found = training.estimate(1, lambda: float(loss()))
    mean = torch.zeros_like(weight).detach()
    for k, slope in enumerate(found.slopes):
        z = fill_(torch.empty_like(mean), seed=0, name=f"w/{k}", step=1, kind=draw)
        mean += slope * z / len(found.slopes)
    assert F.cosine_similarity(mean.flatten(), weight.grad.flatten(), dim=0) > 0.98
    assert mean.norm() == pytest.approx(float(weight.grad.norm()), rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_rate_a_snapshot_restores_to_the_bit(dtype):
    model = create(CONFIG, seed=0).to(dtype)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    training = TwoPoint(trained(model), seed=0, perturbations=2, snapshot=True)
    for step in range(1, 4):
        training.update(step, 0.0, lambda: loss_of(model, rows()))
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_in_place_fp32_weights_come_back_to_rounding_and_bf16_ones_do_not():
    drift = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = normal_(torch.empty(1000, dtype=dtype), seed=0, name="w")
        before = weight.clone()
        training = TwoPoint({"w": weight}, seed=0)
        for step in range(1, 101):
            training.update(step, 0.0, lambda: 0.0)
        drift[dtype] = float((weight - before).float().norm() / before.float().norm())
    assert 0 < drift[torch.float32] < 1e-5
    assert drift[torch.bfloat16] > 1e-2


def test_a_loss_that_raises_leaves_the_weights():
    model = create(CONFIG, seed=0)
    calls = iter(range(100))

    def raises() -> float:
        if next(calls) == 2:
            raise RuntimeError("no memory")
        return 1.0

    training = TwoPoint(trained(model), seed=0, perturbations=3, snapshot=True)
    with pytest.raises(RuntimeError, match="no memory"):
        training.update(1, 0.1, raises)
    assert same(model, create(CONFIG, seed=0))
    assert training.log == []


def test_what_is_no_number_makes_no_update():
    model = create(CONFIG, seed=0)
    training = TwoPoint(trained(model), seed=0, perturbations=2, snapshot=True)
    assert not training.update(1, 0.1, lambda: math.nan).finite
    assert training.log == [(1, 0.0, 0.0, 0.0)]
    assert same(model, create(CONFIG, seed=0))


@pytest.mark.parametrize("snapshot", [False, True])
def test_the_log_replays_to_the_bit(snapshot):
    options: dict[str, Any] = {"seed": 3, "perturbations": 2, "snapshot": snapshot}
    model, again = create(CONFIG, seed=0), create(CONFIG, seed=0)
    training = TwoPoint(trained(model), **options)
    run(training, model, 4)
    training.update(5, 0.1, lambda: math.inf)
    run(training, model, 2)
    replayed = TwoPoint(trained(again), **options)
    replayed.replay(training.log)
    assert same(model, again)
    assert replayed.log == training.log


def test_tied_weights_are_perturbed_once():
    layer = nn.Linear(3, 3, bias=False)
    both = nn.ModuleDict({"a": layer, "b": nn.Linear(3, 3, bias=False)})
    both["b"].weight = layer.weight
    named = list(both.named_parameters(remove_duplicate=False))
    assert [name for name, _ in named] == ["a.weight", "b.weight"]
    training = TwoPoint(named, seed=0, epsilon=0.5, snapshot=True)
    start, seen = layer.weight.detach().clone(), []
    training.estimate(1, lambda: float(seen.append(layer.weight.detach().clone()) or 0))
    z = fill_(torch.empty(3, 3), seed=0, name="a.weight/0", step=1)
    assert torch.equal(seen[0], start + 0.5 * z)
    assert torch.equal(seen[1], start + -0.5 * z)


# Streams


def streamed(model: nn.Module, **options: Any) -> StreamedTwoPoint:
    return StreamedTwoPoint(trained(model), model=model, seed=0, **options)


@pytest.mark.parametrize("perturbations", [1, 2])
def test_streamed_and_flushed_is_mezo_to_the_bit(perturbations):
    resident, moved = create(CONFIG, seed=0), create(CONFIG, seed=0)
    decays = dict.fromkeys(trained(moved), 0.1)
    options: dict[str, Any] = {"perturbations": perturbations, "decays": decays}
    plain = TwoPoint(trained(resident), seed=0, snapshot=True, **options)
    training = streamed(moved, **options)
    for steps in (3, 2):  # flushed in between
        run(plain, resident, steps)
        run(training, moved, steps)
        assert same(resident, moved)
    assert plain.log == training.log
    again = create(CONFIG, seed=0)
    TwoPoint(trained(again), seed=0, snapshot=True, **options).replay(training.log)
    assert same(again, moved)
    streamer = training.streamer
    assert streamer.most_resident <= 3
    # Up for each pass, and home for each update but those that a flush made at home.
    up, down = (2 * perturbations * 5 * 4, 3 * 4)
    size = streamer.bytes_down // down
    assert streamer.bytes_down == down * size
    assert up * size <= streamer.bytes_up <= (up + 2 * 4) * size
    training.close()
    with torch.enable_grad():
        F.cross_entropy(moved(rows()[:, :-1]).flatten(0, 1), rows()[:, 1:].flatten()).backward()


def test_evaluation_without_a_flush_raises():
    model = create(CONFIG, seed=0)
    training = streamed(model)
    training.update(1, 1e-2, lambda: loss_of(model, rows()))
    with torch.no_grad(), pytest.raises(InputError, match="an update behind; call flush"):
        loss_of(model, rows())
    training.flush()
    with pytest.raises(InputError, match=r"no backward pass; use torch\.no_grad"):
        loss_of(model, rows())
    with torch.no_grad():
        found = loss_of(model, rows())
    training.close()
    with torch.no_grad():
        assert found == loss_of(model, rows())


def test_frozen_weights_of_blocks_move_too_and_stay_what_they_are():
    model, plain = create(CONFIG, seed=0), create(CONFIG, seed=0)
    for each in (model, plain):
        for name, value in each.named_parameters():
            value.requires_grad_("mlp" in name)
    chosen = [{n: p for n, p in m.named_parameters() if p.requires_grad} for m in (model, plain)]
    training = StreamedTwoPoint(chosen[0], model=model, seed=0)
    run(training, model)
    run(TwoPoint(chosen[1], seed=0, snapshot=True), plain)
    assert same(model, plain)
    assert len(training.streamer) == 4


def test_a_block_that_a_pass_leaves_out_is_updated_at_home():
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
            self.skipped: int | None = None
            for number, block in enumerate(self.blocks):
                normal_(block.weight.data, seed=number, name="w")
                normal_(block.bias.data, seed=number, name="b")

        def forward(self, x: Tensor) -> Tensor:
            for number, block in enumerate(self.blocks):
                x = x if number == self.skipped else block(x).tanh()
            return x

    models = Skipping(), Skipping()
    trainings = (
        StreamedTwoPoint(trained(models[0]), model=models[0], seed=0),
        TwoPoint(trained(models[1]), seed=0, snapshot=True),
    )
    for model, training in zip(models, trainings, strict=True):
        for step, skipped in enumerate((None, 1, 1, None, 0, None), start=1):
            model.skipped = skipped
            training.update(step, 0.1, lambda m=model: float(m(torch.ones(2, 3)).sum()))  # type: ignore[misc]
        training.flush()
    assert same(*models)


def test_what_cannot_be_streamed_is_refused():
    layer = nn.Linear(2, 2)
    with pytest.raises(InputError, match="no list of blocks"):
        StreamedTwoPoint(trained(layer), model=layer, seed=0)
    model = create(CONFIG, seed=0)
    blocks = model.blocks
    blocks[2].mlp.down_proj.weight = blocks[0].mlp.down_proj.weight
    with pytest.raises(InputError, match=r"block 2 shares .*down_proj.weight"):
        streamed(model)
    for options, field in (({"epsilon": 0.0}, "epsilon"), ({"perturbations": 0}, "perturbations")):
        with pytest.raises(InputError, match=field):
            TwoPoint({"w": torch.zeros(2)}, seed=0, **options)


# Ranks


def on_a_mesh(ranks: Ranks, points: int, data: int, snapshot: bool) -> tuple[list[Any], Any]:
    """Five updates where `points` groups of ranks share the points and `data` ranks the rows."""
    model = create(CONFIG, seed=0).double()
    training = TwoPoint(trained(model), seed=0, perturbations=2, snapshot=snapshot)
    place, column = divmod(ranks.rank, data)
    mine = rows(8).chunk(data)[column]
    for step in range(1, 6):
        training.update(
            step,
            1e-2,
            lambda: loss_of(model, mine) / data,
            share=(place, points),
            totals=ranks.sum,
        )
    weights = {name: value.flatten()[:5].tolist() for name, value in model.named_parameters()}
    return [list(row) for row in training.log], weights


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize(("points", "data"), [(2, 1), (1, 2)])
def test_any_mesh_makes_one_process_s_updates(pool: Pool, points, data, snapshot):
    log, weights = on_a_mesh(Ranks(), 1, 1, snapshot)
    results = pool.run(on_a_mesh, points, data, snapshot, ranks=points * data)
    for other_log, other in results:
        for one, two in zip(log, other_log, strict=True):
            assert two == pytest.approx(one, rel=1e-9, abs=1e-10)
        for name, values in weights.items():
            assert other[name] == pytest.approx(values, rel=1e-10, abs=1e-12)
        assert (other_log, other) == results[0]  # all ranks alike, to the bit


def test_an_objective_without_a_gradient_is_raised():
    # The count of errors, in steps: its differences along large directions still point somewhere.
    inputs = normal_(torch.empty(400, 8), seed=0, name="x")
    labels = inputs @ normal_(torch.empty(8), seed=1, name="true") > 0
    weight = normal_(torch.empty(8), seed=2, name="w")

    def errors() -> float:
        return float(((inputs @ weight > 0) != labels).double().mean())

    training, before = TwoPoint({"w": weight}, seed=0, epsilon=0.3, perturbations=4), errors()
    for step in range(1, 200):
        training.update(step, 1.0, errors)
    assert errors() < 0.3 * before

"""The blocks of ADMM on an unfolded recurrent net, and its program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tests.trainer.test_ranks import column, outcome, trains
from torch import Tensor

from modicum.core.contracts.ledger import ModelQuery, OptimizerQuery
from modicum.core.contracts.parameters import trained_shapes
from modicum.core.contracts.step import StepContext
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError
from modicum.core.machine.memory import TensorMeter
from modicum.core.ranks.ranks import Ranks
from modicum.data.sequences import delayed_recall
from modicum.models.recurrent import RecurrentConfig, RecurrentNet, create
from modicum.optim import ADMMRNN
from modicum.optim.unfolded_net import NetWeights, Penalties, UnfoldedNet
from modicum.proofs.contracts.optim.subjects import llama
from modicum.recipe import Recipe
from modicum.tasks.causal_lm import CausalLM
from modicum.tasks.sequences import SequenceClasses, SequenceTask

STEPS, ROWS, WIDTH, CHANNELS, CLASSES = 5, 7, 6, 3, 4
PENALTIES = Penalties(mu=0.7, rho=3.0, tau=0.2, kappa=0.01)


def unfolded(*, feasible: bool = False, **penalties: float) -> tuple[UnfoldedNet, NetWeights]:
    """Random variables and weights in fp64; lengths differ, and one label is not trained."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = NetWeights(
        draw(WIDTH, CHANNELS + WIDTH + 1) / 2, draw(CLASSES, WIDTH + 1), inputs=CHANNELS
    )
    last = torch.tensor([4, 4, 2, 0, 3, 1, 4])
    labels = torch.tensor([0, 1, 2, 3, 0, 1, -100])
    net = UnfoldedNet(draw(STEPS, ROWS, CHANNELS), last, labels, replace(PENALTIES, **penalties))
    net.forward(weights)
    if not feasible:
        net.a, net.s, net.o = draw(STEPS, ROWS, WIDTH), 2 * draw(STEPS, ROWS, WIDTH), net.o + 1
        net.multipliers = [draw(ROWS, WIDTH), draw(ROWS, WIDTH), draw(ROWS, CLASSES)]
    return net, weights


def output_block(net: UnfoldedNet, weights: NetWeights) -> NetWeights:
    kappa = net.penalties.kappa
    return weights.with_output(net.output_equations().solved(weights.output, kappa))


def recurrent_block(net: UnfoldedNet, weights: NetWeights) -> NetWeights:
    kappa = net.penalties.kappa
    return weights.with_recurrent(net.recurrent_equations().solved(weights.recurrent, kappa))


def variables(name: str) -> Any:
    def block(net: UnfoldedNet, weights: NetWeights) -> NetWeights:
        getattr(net, f"update_{name}")(weights)
        return weights

    return block


BLOCKS = {
    "o": variables("o"),
    "output": output_block,
    "s": variables("s"),
    "a": variables("a"),
    "recurrent": recurrent_block,
}


def lagrangian_by_loops(net: UnfoldedNet, weights: NetWeights) -> float:
    """L of the module's docstring, sequence by sequence and step by step."""
    u, w, b, v, c = weights.parts
    rho, total = net.penalties.rho, 0.0
    for row in range(ROWS):
        if net.labels[row] < 0:
            continue
        last, state = int(net.last[row]), torch.zeros(WIDTH, dtype=torch.float64)
        l1, l2, l3 = (each[row] for each in net.multipliers)
        total -= float(net.o[row].log_softmax(0)[net.labels[row]])
        for step in range(last + 1):
            r1 = net.a[step, row] - u @ net.x[step, row] - w @ state - b
            r2 = net.s[step, row] - net.a[step, row].tanh()
            state = net.s[step, row]
            if step < last:
                total += net.penalties.mu / 2 * float(r1 @ r1 + r2 @ r2)
            else:
                r3 = net.o[row] - v @ state - c
                pairs = ((r1, l1), (r2, l2), (r3, l3))
                total += rho / 2 * sum(float((r - m / rho).square().sum()) for r, m in pairs)
    return total


def test_the_lagrangian_is_that_of_the_paper_step_by_step() -> None:
    net, weights = unfolded()
    assert float(net.value(weights)) == pytest.approx(lagrangian_by_loops(net, weights), rel=1e-12)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("rho", [0.05, 3.0, 40.0])
def test_no_block_raises_the_lagrangian(name: str, rho: float) -> None:
    net, weights = unfolded(rho=rho)
    before = float(net.value(weights))
    after = float(net.value(BLOCKS[name](net, weights)))
    assert after < before - 1e-6
    again, same = unfolded(feasible=True, rho=rho)
    before = float(again.value(same))
    assert float(again.value(BLOCKS[name](again, same))) <= before + 1e-12 * abs(before)


def test_closed_forms_are_where_the_gradient_is_zero() -> None:
    net, weights = unfolded(tau=0.0)
    net.update_s(weights)
    net.s.requires_grad_()
    net.value(weights).backward()
    assert net.s.grad is not None
    assert net.s.grad.abs().max() < 1e-8
    net.s = net.s.detach()
    for name, block in (("output", output_block), ("recurrent", recurrent_block)):
        before = getattr(weights, name).clone()
        found = block(net, weights)
        moved = getattr(found, name).clone().requires_grad_()
        with_moved = getattr(found, f"with_{name}")(moved)
        sums = getattr(net, f"{name}_equations")()
        pull = net.penalties.kappa * sums.weight / 2 * (moved - before).square().sum()
        (net.value(with_moved) + pull).backward()
        assert moved.grad is not None
        assert moved.grad.abs().max() < 1e-8, name


def test_states_with_a_proximal_term_are_where_its_gradient_is_zero() -> None:
    net, weights = unfolded(tau=0.9)
    old = net.s.clone()
    net.update_s(weights)
    kept = (net.w == 0).expand_as(net.s)
    assert torch.equal(net.s[kept], old[kept])
    net.s.requires_grad_()
    (net.value(weights) + 0.45 * ((net.s - old) * (net.w > 0)).square().sum()).backward()
    assert net.s.grad is not None
    assert net.s.grad.abs().max() < 1e-8


def test_after_a_forward_pass_nothing_is_broken_and_only_the_loss_moves_states() -> None:
    net, weights = unfolded(feasible=True)
    assert all(float(each.abs().max()) < 1e-14 for each in net.residuals(weights))
    states, inner = net.s.clone(), net.a.clone()
    net.update_s(weights)
    net.update_a(weights)
    assert torch.allclose(net.s, states, atol=1e-12)
    assert torch.allclose(net.a, inner, atol=1e-12)
    net.update_o(weights)
    net.update_s(weights)
    assert not torch.allclose(net.at_end(net.s), net.at_end(states), atol=1e-6)


def test_the_last_step_is_each_sequences_own() -> None:
    net, weights = unfolded(feasible=True)
    model = create(RecurrentConfig(CHANNELS, WIDTH, CLASSES), seed=0).double()
    for name, value in zip(
        ("blocks.0.input.weight", "blocks.0.recurrent.weight", "blocks.0.input.bias",
         "head.weight", "head.bias"), weights.parts, strict=True,
    ):  # fmt: skip
        model.get_parameter(name).data.copy_(value)
    assert torch.allclose(net.o, model(net.x.transpose(0, 1), net.last), atol=1e-12)
    longer = torch.cat([net.x, 99 * torch.ones_like(net.x)])
    padded = UnfoldedNet(longer, net.last, net.labels, net.penalties)
    padded.forward(weights)
    one, other = weights, weights
    for _ in range(3):
        for name in BLOCKS:
            one, other = BLOCKS[name](net, one), BLOCKS[name](padded, other)
        net.update_multipliers(one)
        padded.update_multipliers(other)
    assert torch.allclose(one.recurrent, other.recurrent, atol=1e-10)
    assert torch.allclose(one.output, other.output, atol=1e-10)


def test_normal_equations_of_parts_add_up_to_those_of_all() -> None:
    net, weights = unfolded()
    for name in ("output", "recurrent"):
        full = getattr(net, f"{name}_equations")()
        parts = []
        for rows in (slice(0, 3), slice(3, None)):
            part = UnfoldedNet(net.x[:, rows], net.last[rows], net.labels[rows], net.penalties)
            part.a, part.s, part.o = net.a[:, rows], net.s[:, rows], net.o[rows]
            part.multipliers = [each[rows] for each in net.multipliers]
            parts.append(getattr(part, f"{name}_equations")())
        flat = parts[0].flat() + parts[1].flat()
        assert torch.allclose(flat, full.flat(), rtol=1e-13, atol=1e-13)
        before, kappa = getattr(weights, name), net.penalties.kappa
        found = full.filled(flat).solved(before, kappa)
        assert torch.allclose(found, full.solved(before, kappa), rtol=1e-10, atol=1e-12)


def test_with_a_large_kappa_weights_stay() -> None:
    net, weights = unfolded(kappa=1e12)
    assert torch.allclose(output_block(net, weights).output, weights.output, atol=1e-9)
    assert torch.allclose(recurrent_block(net, weights).recurrent, weights.recurrent, atol=1e-9)


def test_residuals_at_the_last_step_vanish() -> None:
    net, weights = unfolded(feasible=True)
    for _ in range(400):
        for block in BLOCKS.values():
            weights = block(net, weights)
        net.update_multipliers(weights)
    trained = net.labels >= 0
    assert max(float(each[trained].abs().max()) for each in net.residuals(weights)) < 1e-3


# The program


def program_of(model: torch.nn.Module, task: Any = None, **fields: Any) -> Any:
    context = StepContext(
        model, 0, task=task or SequenceTask(SequenceClasses()), strategy=Strategy(), groups=list
    )
    return ADMMRNN(**fields).bind_step(context)


def net_of(seed: int = 0) -> RecurrentNet:
    return create(RecurrentConfig(CHANNELS, 8, CHANNELS), seed=seed)


ASKED = {"length": 6, "classes": CHANNELS, "noise": 0.1, "seed": 1, "shortest": 4}


def test_the_loss_said_is_that_of_a_true_forward_pass() -> None:
    model, batch = net_of(), delayed_recall(32, **ASKED).batch(range(32))
    program, task = program_of(model), SequenceTask(SequenceClasses())
    for step in (1, 2, 3, 4, 5):
        expected = task.evaluate(model, batch)["loss"] / 32
        outcome = program(step, batch.split(10), 32, lambda: None)
        assert outcome.loss == pytest.approx(expected, rel=1e-5)
        assert outcome.gradient_norm is None
    assert task.evaluate(model, batch)["loss"] / 32 < 0.9 * expected


def recipe(**more: Any) -> Recipe:
    values: dict[str, Any] = {
        "task": {"method": "sequences", "sequences": 64, "held_out": 16, "length": 5, "width": 8},
        "optimizer": {"method": "admm_rnn", "iterations": 3},
        "training": {"steps": 3, "batch_size": 16, "schedule": "constant", "clip_norm": None},
        "samples": {"count": 0},
    }
    for section, fields in more.items():
        values[section] = {**values.get(section, {}), **fields} if fields else None
    return Recipe(**{section: fields for section, fields in values.items() if fields})


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"task": None, "model": {"width": 16}}, "set task.method to sequences"),
        ({"training": {"precision": "bf16"}}, "it solves normal equations"),
        ({"training": {"schedule": "cosine"}}, "set training.schedule to constant"),
        ({"training": {"learning_rate": 0.5}}, "leave training.learning_rate out"),
        ({"training": {"clip_norm": 1.0}}, "no gradients to clip"),
    ],
)
def test_what_it_does_not_go_with_is_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why) as refused:
        recipe(**asked).refuse_clashes(())
    assert "\n" not in str(refused.value)


def test_sharded_weights_are_refused() -> None:
    for words in ({"run_cuts_weights", "run_on_fsdp"}, {"run_cuts_weights", "run_masters"}):
        with pytest.raises(InputError, match="it solves for full weights"):
            recipe().refuse_clashes(words)
    recipe().refuse_clashes({"run_whole_weights"})


def test_another_model_and_low_precision_are_refused() -> None:
    with pytest.raises(InputError, match="one layer of tanh"):
        program_of(llama(), CausalLM())
    with pytest.raises(InputError, match="in fp32 or fp64"):
        program_of(net_of().bfloat16())


@pytest.mark.parametrize(
    ("width", "rows", "length", "parts"),
    [(24, 256, 20, 1), (24, 256, 20, 4), (128, 64, 12, 4), (256, 4, 2, 1), (100, 16, 8, 16)],
)
def test_the_ledger_holds_what_an_update_takes(
    width: int, rows: int, length: int, parts: int
) -> None:
    asked = {"length": length, "classes": CHANNELS, "noise": 0.1, "seed": 1}
    batch = delayed_recall(rows, **asked).batch(range(rows))
    model = create(RecurrentConfig(CHANNELS, width, CHANNELS), seed=0)
    program, value = program_of(model, iterations=2), ADMMRNN(iterations=2)
    at = OptimizerQuery(
        trained_shapes(model), batch=ModelQuery(rows // parts, length, micro_batches=parts)
    )
    said = value.ledger(at).bytes("workspace", "step")
    micro_batches = batch.split(rows // parts)
    with TensorMeter("cpu") as meter:
        program(1, micro_batches, rows, lambda: None)
    assert meter.peak is not None
    assert 0.9 * said < meter.peak < 1.02 * said, (meter.peak, said)


@pytest.mark.expensive
@pytest.mark.ranks
def test_two_ranks_make_the_updates_of_one_and_resume_to_the_bit(
    pool: Pool, tmp_path: Path
) -> None:
    asked = recipe(
        training={"batch_size": 15, "micro_batch_size": 4, "steps": 4},
        task={"shortest": 3},
        checkpoint={"every": 2},
        evaluation={"every": 2},
    ).plain()
    assert trains(Ranks(), asked, tmp_path / "alone") == "done"
    shared = {**asked, "parallel": {"strategy": "ddp"}}
    assert pool.run(trains, shared, tmp_path / "two", ranks=2) == ["done"] * 2
    for file in ("metrics", "evaluations"):
        one, two = (column(tmp_path / each, "loss", file) for each in ("alone", "two"))
        assert two == pytest.approx(one, rel=1e-4)
    assert column(tmp_path / "alone", "loss")[-1] < column(tmp_path / "alone", "loss")[0]
    assert trains(Ranks(), asked, tmp_path / "stopped", (0, 3)).startswith("4: stopped")
    assert trains(Ranks(), asked, tmp_path / "stopped") == "done"
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "alone")

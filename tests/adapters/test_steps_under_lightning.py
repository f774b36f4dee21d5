"""Adapters that follow steps under Lightning: told in the order of its calls, as in a loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from modicum.adapters import SALT
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.steps import AdapterSteps
from modicum.core.contracts.lightning_callback import LightningCalls
from modicum.core.contracts.parameters import is_idle
from modicum.core.errors import InputError
from modicum.planner.combinations import CombinationRow, rows
from modicum.proofs.contracts.adapters.subjects import attached, llama, stir, tokens

FOLLOWING = [row for row in rows() if {"adapts_base", "follows_steps"} <= row.traits]
ALONE = [row for row in FOLLOWING if "pairs_passes" not in row.traits]
each_row = pytest.mark.parametrize("row", ALONE, ids=lambda row: row.name)
MICRO_BATCHES, UPDATES = 2, 4
BATCHES = tokens(2 * MICRO_BATCHES * UPDATES).split(2)
TOLD = ("before_update", "before_forward", "after_optimizer", "close")


class Step(nn.Module):
    """A module with the step that Lightning calls.

    Args:
        weight: of the task's loss.
    """

    def __init__(self, model: nn.Module, weight: float = 1.0) -> None:
        super().__init__()
        self.model, self.weight = model, weight

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.weight * self.model(batch).square().mean()


def following(row: CombinationRow) -> AttachedAdapter:
    """The row's adapter on a small model, whose factors are not where they begin."""
    return stir(attached(row.record.load()(**row.fields), llama()))  # type: ignore[arg-type]


def optimizer_of(adapter: AttachedAdapter) -> torch.optim.Optimizer:
    """One that moves by momentum and decay what has a gradient of zeros."""
    return torch.optim.AdamW(adapter.parameters(), lr=1e-2, weight_decay=0.1)


def in_lightning_s_order(
    callback: LightningCalls, step: Step, optimizer: torch.optim.Optimizer
) -> None:
    """Train as Lightning does: an update's last backward pass is within the optimizer's step."""
    trainer = SimpleNamespace(
        optimizers=[optimizer], global_step=0, accumulate_grad_batches=MICRO_BATCHES
    )

    def closure(batch: Tensor, index: int, last: bool) -> Tensor:
        loss = step.training_step(batch, index) / MICRO_BATCHES
        if index % MICRO_BATCHES == 0:
            optimizer.zero_grad()
        loss.backward()
        if last:
            callback.on_before_optimizer_step(trainer, step, optimizer)
        return loss

    callback.on_train_start(trainer, step)
    for index, batch in enumerate(BATCHES):
        callback.on_train_batch_start(trainer, step, batch, index)
        last = (index + 1) % MICRO_BATCHES == 0
        if last:
            optimizer.step(partial(closure, batch, index, last))  # type: ignore[arg-type]
            trainer.global_step += 1
        else:
            closure(batch, index, last)
        callback.on_train_batch_end(trainer, step, None, batch, index)
    callback.on_train_end(trainer, step)


def in_a_loop(row: CombinationRow) -> AttachedAdapter:
    """The adapter after the same updates, by calls that a loop makes itself."""
    adapter = following(row)
    step, optimizer, steps = Step(adapter.model), optimizer_of(adapter), adapter.steps()
    for index, batch in enumerate(BATCHES):
        steps.before_forward(1 / MICRO_BATCHES)
        (step.training_step(batch, index) / MICRO_BATCHES).backward()
        if (index + 1) % MICRO_BATCHES == 0:
            optimizer.step()
            steps.update()
            optimizer.zero_grad()
    steps.close()
    return adapter


def noted(steps: AdapterSteps, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of the members from here on, with what they are given first."""
    calls: list[Any] = []

    def noting(name: str, member: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            calls.append((name, *given[:1]))
            return member(*given)

        return call

    for name in TOLD:
        monkeypatch.setattr(steps, name, noting(name, getattr(steps, name)))
    return calls


def assert_as_in_a_loop(found: AttachedAdapter, row: CombinationRow) -> None:
    """Demand the numbers of a loop to the bit, which are others than before it."""
    begun, state = following(row).state_dict(), found.state_dict()
    expected = in_a_loop(row).state_dict()
    assert any(not torch.equal(begun[name], value) for name, value in expected.items())
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@each_row
def test_in_the_order_of_lightning_s_calls_it_does_what_it_does_in_a_loop(
    row: CombinationRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = following(row)
    steps = adapter.steps()
    calls = noted(steps, monkeypatch)
    callback = LightningCalls(lambda model, optimizer: steps)
    in_lightning_s_order(callback, Step(adapter.model), optimizer_of(adapter))
    share = ("before_forward", 1 / MICRO_BATCHES)
    told = [
        (("before_update", step), *[share] * MICRO_BATCHES, ("after_optimizer", step))
        for step in range(1, UPDATES + 1)
    ]
    assert calls == [*(call for update in told for call in update), ("close",)]
    assert steps.updates == UPDATES
    assert not any(layer.followed for layer in steps.layers)
    assert not any(is_idle(factor) for factor in adapter.parameters())
    assert_as_in_a_loop(adapter, row)


def test_a_penalty_is_added_once_an_update_and_not_at_the_loss_s_scale() -> None:
    adapter = stir(SALT(rank=2, penalty=0.5).attach(llama()))
    steps, factors, seen = adapter.steps(), list(adapter.parameters()), []

    class Seeing(LightningCalls):
        def on_before_optimizer_step(self, *given: Any) -> None:
            super().on_before_optimizer_step(*given)
            total = torch.stack([layer.term().reshape(()) for layer in steps.layers]).sum()
            expected = torch.autograd.grad(total, factors)
            seen.append(total.item())
            for factor, one in zip(factors, expected, strict=True):
                torch.testing.assert_close(factor.grad, one)
            assert steps.added_loss() == pytest.approx(total.item(), rel=1e-5)

    callback = Seeing(lambda model, optimizer: steps)
    optimizer = torch.optim.SGD(factors, lr=0.1)
    in_lightning_s_order(callback, Step(adapter.model, weight=0.0), optimizer)
    assert len(seen) == UPDATES
    assert seen[-1] < seen[0]


@pytest.mark.parametrize(
    "row", [row for row in FOLLOWING if row not in ALONE], ids=lambda row: row.name
)
def test_a_loss_between_two_passes_is_refused(row: CombinationRow) -> None:
    adapter = following(row)
    steps = adapter.steps()
    callback = LightningCalls(lambda model, optimizer: steps)
    trainer = SimpleNamespace(optimizers=[optimizer_of(adapter)], global_step=0)
    with pytest.raises(InputError, match="adds a term to the loss; add it in training_step"):
        callback.on_train_start(trainer, Step(adapter.model))
    assert not any(layer.followed for layer in steps.layers)


@pytest.mark.expensive
@pytest.mark.filterwarnings("ignore")
@each_row
def test_under_lightning_s_trainer_it_does_what_it_does_in_a_loop(
    row: CombinationRow, tmp_path: Path
) -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    adapter = following(row)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.step = Step(adapter.model)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.step.training_step(batch, index)

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.step.training_step(batch, index)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(adapter)

    steps = adapter.steps()
    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=MICRO_BATCHES, accelerator="cpu", logger=False,
        val_check_interval=3, callbacks=[steps.lightning_callback()], default_root_dir=tmp_path,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = DataLoader(torch.cat(BATCHES), batch_size=2)
    trainer.fit(Module(), data, data)
    assert steps.updates == UPDATES
    assert_as_in_a_loop(adapter, row)

"""Hooks under Lightning: by the order of its calls, and by its trainer where it is installed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.core.contracts.test_run_hooks import Everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from modicum.core.contracts.lightning_callback import LightningCalls, lightning_callback_of
from modicum.core.contracts.run_hooks import RunHook
from modicum.core.errors import InputError
from modicum.optim import Eva
from modicum.optim.transform import TransformContext


class Allowed(Everything):
    """Has all that Lightning shows to callbacks."""

    extra_loss = RunHook.extra_loss


class Steps(nn.Linear):
    """A module with the steps that Lightning calls, and nothing else of it."""

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, _: int) -> None:
        self(batch)


PASS = ["enter", "leave"]
UPDATE = ["before_update", *PASS * 2, "after_backward", "before_optimizer", "after_optimizer"]
# Two updates of two micro-batches, an evaluation of four batches.
EPOCH = [*UPDATE * 2, "enter", *PASS * 4, "leave", "epoch_end", "checkpoint"]


def names(calls: list[Any]) -> list[str]:
    return [call[1] for call in calls]


def test_the_members_are_called_in_lightning_s_order() -> None:
    calls: list[Any] = []
    hook = Allowed("a", calls)
    callback, module = LightningCalls(lambda model, optimizer: hook), Steps(1, 1)
    optimizer = torch.optim.SGD(module.parameters())
    trainer = SimpleNamespace(
        optimizers=[optimizer], global_step=0, accumulate_grad_batches=2, current_epoch=0,
        sanity_checking=True,
    )  # fmt: skip
    callback.on_validation_start(trainer, module)
    callback.on_validation_end(trainer, module)
    trainer.sanity_checking = False
    callback.on_train_start(trainer, module)
    for batch in range(4):
        callback.on_train_batch_start(trainer, module, None, batch)
        module.training_step(torch.ones(1), batch)
        if batch % 2:
            callback.on_before_optimizer_step(trainer, module, optimizer)
            trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, None, None, batch)
    callback.on_validation_start(trainer, module)
    for batch in range(4):
        module.validation_step(torch.ones(1), batch)
    callback.on_validation_end(trainer, module)
    callback.on_train_epoch_end(trainer, module)
    callback.on_save_checkpoint(trainer, module, {})
    callback.on_train_end(trainer, module)
    assert names(calls) == EPOCH
    assert [call[2] for call in calls if call[1] == "enter"][-5:] == [
        "evaluation",
        *["evaluate"] * 4,
    ]
    assert "training_step" not in vars(module)
    assert [call[2] for call in calls if call[1] == "after_optimizer"] == [1, 2]


@pytest.mark.parametrize(
    ("hook", "optimizers", "said"),
    [
        (Everything("a", []), 1, "adds a term to the loss; add it in training_step"),
        (Allowed("a", []), 2, "one optimizer"),
    ],
)
def test_what_lightning_shows_to_no_callback_is_refused(
    hook: RunHook, optimizers: int, said: str
) -> None:
    callback, module = LightningCalls(lambda model, optimizer: hook), nn.Linear(1, 1)
    given = [torch.optim.SGD(module.parameters())] * optimizers
    trainer = SimpleNamespace(optimizers=given, global_step=0)
    with pytest.raises(InputError, match=said):
        callback.on_train_start(trainer, module)


def test_without_lightning_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pytorch_lightning", "lightning.pytorch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(InputError, match=r"modicum\[lightning\]"):
        lightning_callback_of(lambda model, optimizer: RunHook())


@pytest.mark.expensive
@pytest.mark.filterwarnings("ignore")
def test_lightning_s_trainer_calls_them_so(tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.steps = Steps(2, 1)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.steps.training_step(batch, index)

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.steps.validation_step(batch, index)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    calls: list[Any] = []
    trainer = lightning.Trainer(
        max_epochs=2, accumulate_grad_batches=2, accelerator="cpu", logger=False,
        callbacks=[Allowed("a", calls).lightning_callback()], default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    rows = DataLoader(torch.ones(8, 2), batch_size=2)
    trainer.fit(Module(), rows, rows)
    assert names(calls) == EPOCH * 2


@pytest.mark.expensive
@pytest.mark.filterwarnings("ignore")
def test_a_transform_does_what_it_does_in_a_loop(tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)

    batches = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(0))
    trained, loop = Module(), Module()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, callbacks=[Eva().lightning_callback()],
        default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(trained, DataLoader(batches.flatten(0, 1), batch_size=8))
    optimizer = loop.configure_optimizers()
    eva = Eva().bind(TransformContext(loop, optimizer=optimizer))
    for batch in batches:
        loop.training_step(batch, 0).backward()
        eva.apply()
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(trained.parameters(), loop.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.expensive
@pytest.mark.filterwarnings("ignore")
def test_the_page_s_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pytorch_lightning")
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[3] / "docs" / "how-to" / "under-other-trainers.md"
    [block] = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(block, page.name, "exec"), {})
    assert (tmp_path / "lightning-adapter" / "adapter_config.json").exists()

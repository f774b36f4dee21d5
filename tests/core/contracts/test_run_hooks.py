from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from modicum.core.contracts.hooks_in_order import RunHooks
from modicum.core.contracts.lightning_callback import LightningCalls
from modicum.core.contracts.run_hooks import MEMBERS, ExtraLoss, RunHook
from modicum.core.contracts.strategy import Strategy
from modicum.core.contracts.trainer_callback import HookCalls
from modicum.core.errors import InputError


class Everything(RunHook):
    """Has every member; notes each call."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name, self.calls = name, calls

    def _note(self, *what: object) -> None:
        self.calls.append((self.name, *what))

    @contextmanager
    def _within(self, *what: object):
        self._note("enter", *what)
        yield
        self._note("leave", *what)

    def before_update(self, step):
        self._note("before_update", step)

    def forward_context(self, kind):
        return self._within(kind)

    def extra_loss(self):
        return ExtraLoss(torch.ones(()), 2.0)

    def update_loss(self, loss):
        self._note("update_loss", loss)

    def after_backward(self):
        self._note("after_backward")

    def before_optimizer(self, step):
        self._note("before_optimizer", step)

    def after_optimizer(self, step, optimizer):
        self._note("after_optimizer", step)

    def evaluation(self):
        return self._within("evaluation")

    def findings(self):
        self._note("findings")
        return [{"of": self.name}] if self.name == "a" else []

    def checkpoint(self):
        self._note("checkpoint")

    def epoch_end(self, epoch):
        self._note("epoch_end", epoch)


class Duck(RunHook):
    """Has one member."""

    epochs = 0

    def epoch_end(self, epoch: int) -> None:
        self.epochs = epoch


def test_every_member_reaches_every_hook_in_order() -> None:
    calls: list[Any] = []
    hooks = RunHooks({name: Everything(name, calls) for name in "ab"})
    hooks.before_update(3)
    with hooks.forward_context("train"):
        pass
    assert [term.count for term in hooks.extra_losses()] == [2.0, 2.0]
    hooks.update_loss(0.5)
    hooks.after_backward()
    hooks.before_optimizer(3)
    hooks.after_optimizer(3, torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    with hooks.evaluation():
        pass
    assert hooks.findings() == {"a": [{"of": "a"}]}
    hooks.checkpoint()
    hooks.epoch_end(1)
    nested = [("enter", "a"), ("enter", "b"), ("leave", "b"), ("leave", "a")]
    expected: list[tuple[object, ...]] = [("a", "before_update", 3), ("b", "before_update", 3)]
    expected += [(name, what, "train") for what, name in nested]
    members = ("update_loss", 0.5), ("after_backward",), ("before_optimizer", 3)
    for member, *values in (*members, ("after_optimizer", 3)):
        expected += [(name, member, *values) for name in "ab"]
    expected += [(name, what, "evaluation") for what, name in nested]
    expected += [(name, "findings") for name in "ab"]
    expected += [(name, "checkpoint") for name in "ab"] + [(name, "epoch_end", 1) for name in "ab"]
    assert calls == expected


def test_a_hook_with_a_member_takes_part_and_nothing_else() -> None:
    duck = Duck()
    others = {"plain": RunHook(), "strategy": Strategy(), "model": nn.Linear(1, 1), "none": None}
    hooks = RunHooks({"duck": duck, **others})
    assert list(hooks.named) == ["duck"]
    hooks.epoch_end(2)
    hooks.before_update(1)
    assert duck.epochs == 2
    assert not hooks.enter_passes
    hooks.remove("duck")
    hooks.epoch_end(3)
    assert duck.epochs == 2
    assert all(hasattr(RunHook, member) for member in MEMBERS)


def test_two_hooks_of_one_name_are_refused() -> None:
    hooks = RunHooks({"duck": Duck()})
    with pytest.raises(ValueError, match="two hooks are called duck"):
        hooks.add("duck", Duck())


def test_hooks_with_a_state_are_known() -> None:
    class Counts(Duck):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    counts = Counts()
    assert RunHooks({"duck": Duck(), "counts": counts}).stateful() == {"counts": counts}


def test_hooks_on_a_model_enter_the_context_even_where_it_raises() -> None:
    class Raises(nn.Linear):
        def forward(self, input):  # noqa: A002
            raise RuntimeError("no")

    calls: list[Any] = []
    for model in (nn.Linear(2, 2), Raises(2, 2)):
        remove = Everything("a", calls).hook_forward(model)
        for training in (True, False):
            model.train(training)
            try:
                model(torch.ones(2))
            except RuntimeError:
                assert isinstance(model, Raises)
        remove()
        model.eval()
    kinds = [("a", what, kind) for kind in ("train", "evaluate") for what in ("enter", "leave")]
    assert calls == kinds * 2


def test_under_transformers_the_members_are_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.layer(x)[:, 0] - labels).square().mean()}

    class NoExtra(Everything):
        extra_loss = RunHook.extra_loss

    def trainer(hook: RunHook) -> Any:
        rows = [{"x": torch.tensor([1.0, n]), "labels": float(n)} for n in range(8)]
        arguments = transformers.TrainingArguments(
            str(tmp_path), num_train_epochs=2, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, eval_strategy="epoch", save_strategy="epoch",
            report_to=[], disable_tqdm=True, use_cpu=True, label_names=["labels"],
        )  # fmt: skip
        made = transformers.Trainer(
            Net(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=[hook.callback()]
        )
        made.remove_callback(transformers.PrinterCallback)
        return made

    calls: list[Any] = []
    trainer(NoExtra("a", calls)).train()
    train = [("enter", "train"), ("leave", "train")] * 2
    update = [*train, ("after_backward",)]
    first = [call[1:] for call in calls]
    assert first[: len(update) + 3] == [
        ("before_update", 1), *update, ("before_optimizer", 1), ("after_optimizer", 1)
    ]  # fmt: skip
    assert [call[1] for call in first if call[0] == "epoch_end"] == [1, 2]
    assert sum(call == ("checkpoint",) for call in first) == 2
    evaluated = [("enter", "evaluation"), ("enter", "evaluate"), ("leave", "evaluate")]
    evaluated.append(("leave", "evaluation"))
    assert [call for call in first if "evaluat" in str(call)] == evaluated * 2
    with pytest.raises(InputError, match="adds a term to the loss"):
        trainer(Everything("a", calls)).train()


class LearnsFromOutputs(Duck):
    """Says what it reads, and that it was closed."""

    reads_output_gradients = True
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
def test_gradients_of_outputs_are_refused_where_losses_are_scaled(trainer: str) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())

    def begun(hook: RunHook, scaler: object) -> None:
        if trainer == "transformers":
            wrapped = SimpleNamespace(optimizer=optimizer, scaler=scaler)
            HookCalls(lambda *_: hook).on_train_begin(model=model, optimizer=wrapped)
        else:
            given = SimpleNamespace(optimizers=[optimizer], global_step=0, scaler=scaler)
            LightningCalls(lambda *_: hook).on_train_start(given, model)

    begun(LearnsFromOutputs(), None)
    begun(Duck(), object())
    hook = LearnsFromOutputs()
    with pytest.raises(InputError, match=r"with fp16 losses are multiplied.*train with bf16"):
        begun(hook, object())
    assert hook.closed

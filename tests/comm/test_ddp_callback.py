"""Exchanges under `transformers.Trainer`: updates are committed once, skipped ones not at all."""

from __future__ import annotations

import math
import re
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn

from modicum.comm import ACPSGD, PowerSGD
from modicum.comm.dense_sums import DenseSums
from modicum.core.errors import InputError
from modicum.core.ranks.ddp_callback import HookedUpdates
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.ranks import Ranks
from modicum.proofs.contracts.transformers_loop import hugging_face_llama, train_under_transformers

UPDATES, SPOILED, DISCARDED = 8, 3, 6


class PassingOver(torch.optim.SGD):
    """Does nothing where a gradient is not finite, or where it is told to."""

    told = False

    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        finite = all(bool(each.isfinite().all()) for each in gradients if each is not None)
        if finite and not self.told:
            super().step()


def state_of(hooked: HookedUpdates) -> dict[str, Any]:
    assert hooked.hook is not None
    views = hooked.hook.exchange.views()
    return {
        f"{view.name}/{name}": value.clone() if isinstance(value, torch.Tensor) else value
        for view in views
        for name, value in view.read().items()
    }


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


def trained(ranks: Ranks, method: Any) -> dict[str, Any]:
    """Updates of two micro-batches, one with a NaN on a rank, one that is passed over."""
    import transformers

    model = hugging_face_llama()
    optimizer = PassingOver(model.parameters(), lr=0.1)
    hooked: list[Any] = []
    found: dict[str, Any] = {"steps": [], "calls": [], "states": []}

    class Looks(transformers.TrainerCallback):
        """Spoils an update, has one passed over, and notes what is owed."""

        spoils = False

        def on_step_begin(self, *given: Any, **_: Any) -> None:
            self.spoils = given[1].global_step + 1 == SPOILED and ranks.rank == 1

        def on_pre_optimizer_step(self, *given: Any, **_: Any) -> None:
            optimizer.told = given[1].global_step + 1 == DISCARDED
            if optimizer.told:
                hooked[0].hook.discard()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            exchange = hooked[0].hook.exchange
            found["steps"].append(exchange.step)
            found["calls"].append(exchange.wire.meter.calls.total())
            found["states"].append(state_of(hooked[0]))

    looks = Looks()
    model.lm_head.register_forward_hook(
        lambda _, __, output: output * float("nan") if looks.spoils else output
    )

    def callback(trainer: Any) -> Any:
        hooked.append(method.callback(trainer))
        trainer.add_callback(hooked[0])
        return looks

    train_under_transformers(
        model,
        torch.randint(29, (32, 8), generator=torch.Generator().manual_seed(0)),
        optimizer=optimizer,
        given_trainer=callback,
        max_steps=UPDATES,
        gradient_accumulation_steps=2,
        ddp_backend="gloo",
    )
    states = found.pop("states")
    found["same"] = [equal(one, other) for one, other in pairwise(states)]
    found["weights"] = [float(p.detach().double().sum()) for p in model.parameters()]
    return found


@pytest.mark.ranks
@pytest.mark.expensive
def test_an_update_is_committed_once_and_a_skipped_one_not_at_all(pool: Pool) -> None:
    pytest.importorskip("accelerate")
    first, second = pool.run(trained, ACPSGD(rank=2))
    assert first["weights"] == second["weights"]
    assert all(math.isfinite(weight) for weight in first["weights"])
    for found in (first, second):
        assert found["steps"] == [1, 2, 2, 3, 4, 4, 5, 6]
        # By update: after the third one and the sixth one nothing is owed that was not before.
        assert found["same"] == [False, True, False, False, True, False, False]
        # Once an update, with its last micro-batch; DDP forms its buckets anew after the first.
        assert {after - before for before, after in pairwise(found["calls"])} == {1}


def resuming(ranks: Ranks, folder: str) -> dict[str, Any]:
    """Six updates at once; three and three; and three after a checkpoint without what is owed."""
    hooked: list[Any] = []

    def run(**arguments: Any) -> list[Any]:
        model = hugging_face_llama()

        def callback(trainer: Any) -> Any:
            hooked.append(PowerSGD(rank=2).callback(trainer))
            return hooked[-1]

        train_under_transformers(
            model,
            torch.randint(29, (48, 8), generator=torch.Generator().manual_seed(0)),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            given_trainer=callback,
            folder=folder,
            max_steps=6,
            save_steps=3,
            ddp_backend="gloo",
            **arguments,
        )
        return [*(p.detach().clone() for p in model.parameters())]

    whole, half = run(), f"{folder}/checkpoint-3"
    states = [state_of(hooked[0])]
    taken_up = run(resume_from=half)
    states.append(state_of(hooked[1]))
    file = Path(half) / f"modicum_exchange_{ranks.rank}.safetensors"
    content = file.read_bytes()
    if ranks.first:
        file.write_bytes(content[:-1])
    ranks.sum(0.0)
    with pytest.raises(InputError) as damaged:
        run(resume_from=half)
    ranks.sum(0.0)
    file.unlink()
    ranks.sum(0.0)
    with pytest.warns(UserWarning, match="what ranks owe next to these weights") as warned:
        without = run(resume_from=half)
    return {
        "same": all(map(torch.equal, whole, taken_up)) and equal(*states),
        "without": all(map(torch.equal, whole, without)),
        "damaged": str(damaged.value),
        "warned": [str(each.message) for each in warned],
    }


@pytest.mark.ranks
@pytest.mark.expensive
def test_what_is_owed_is_in_the_trainer_s_checkpoints(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for found in pool.run(resuming, str(tmp_path)):
        assert found["same"]
        assert not found["without"]
        assert "modicum_exchange_0.safetensors: damaged" in found["damaged"]
        assert any("checkpoint-3" in text for text in found["warned"])


def page(ranks: Ranks, folder: str) -> list[float]:
    """The page's first example and those for several ranks, as a script that torchrun starts."""
    own = Path(folder) / str(ranks.rank)
    own.mkdir()
    file = Path(__file__).parents[2] / "docs" / "how-to" / "under-other-trainers.md"
    text = file.read_text(encoding="utf-8")
    first = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    several = re.findall(r"^```python ranks\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(several) == 2
    known: dict[str, Any] = {}
    sums = list[float]()
    with chdir(own):
        exec(compile(first, file.name, "exec"), known)
        for block in several:
            exec(compile(block, file.name, "exec"), known)
            sums += [float(p.detach().double().sum()) for p in known["model"].parameters()]
    return sums


@pytest.mark.ranks
@pytest.mark.expensive
def test_the_page_s_example_runs_on_two_ranks(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    first, second = pool.run(page, str(tmp_path))
    assert first == second


def a_trainer(*, ranks: int = 2, scaler: Any = None) -> Any:
    return SimpleNamespace(
        model_wrapped=nn.Linear(8, 8),
        args=SimpleNamespace(world_size=ranks),
        accelerator=SimpleNamespace(scaler=scaler),
    )


def test_one_rank_is_told_that_nothing_travels() -> None:
    callback = HookedUpdates(a_trainer(ranks=1), lambda model: pytest.fail("it was bound"))
    with pytest.warns(UserWarning, match="one rank, and nothing travels"):
        callback.on_train_begin()
    callback.on_optimizer_step()
    assert callback.hook is None


@pytest.mark.parametrize("named", [True, False])
def test_one_rank_that_resumes_says_what_it_does_not_take_up(tmp_path: Path, named: bool) -> None:
    folder = tmp_path / ("elsewhere" if named else "checkpoint-3")
    folder.mkdir()
    trainer = a_trainer(ranks=1)
    trainer.args.output_dir = str(tmp_path)
    trainer.args.resume_from_checkpoint = str(folder) if named else None
    callback = HookedUpdates(trainer, lambda model: pytest.fail("it was bound"))
    for expected in (1, 2):
        with pytest.warns(UserWarning, match="nothing travels|is not taken up by one") as warned:
            callback.on_train_begin(state=SimpleNamespace(global_step=3))
        assert len(warned) == expected
        (folder / "modicum_exchange_0.safetensors").touch()  # as one of several ranks writes it


def test_what_cannot_be_is_refused() -> None:
    scaled = a_trainer(scaler=object())
    with pytest.raises(InputError, match=r"a scale that changes.*train with bf16"):
        HookedUpdates(scaled, lambda _: PowerSGD().bind(ExchangeContext())).on_train_begin()
    for trainer in (scaled, a_trainer()):  # which owes nothing, but is not in DDP
        with pytest.raises(InputError, match="a hook is for a model in DistributedDataParallel"):
            HookedUpdates(trainer, lambda _: DenseSums().bind(ExchangeContext())).on_train_begin()

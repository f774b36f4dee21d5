"""What must hold of every method of the section `watchdog`: it names who is late, and changes
nothing."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from modicum.comm.watchdog import RankWatchdog
from modicum.comm.watching import Watch
from modicum.core.errors import InputError
from modicum.core.ranks.observed_calls import CallLog, observed
from modicum.core.ranks.observed_groups import observing
from modicum.core.ranks.ranks import Ranks
from modicum.proofs.contracts.base import check
from modicum.proofs.contracts.comm.two_ranks import RankFinding, on_two_ranks
from modicum.proofs.contracts.transformers_loop import hugging_face_llama, train_under_transformers

WatchdogSubject = type[RankWatchdog] | RankWatchdog

watchdog_check = partial(check, "comm", slot="watchdog")
STEPS, AT, ASLEEP = 34, 30, 2.5
QUICK = {"late_seconds": 1.0}


def _value(subject: WatchdogSubject, **fields: Any) -> RankWatchdog:
    value = subject if isinstance(subject, RankWatchdog) else subject.tiny()
    known = {name: each for name, each in fields.items() if name in type(value).model_fields}
    return type(value)(**{**value.model_dump(), **known})


@contextmanager
def _watched(ranks: Ranks, value: RankWatchdog) -> Iterator[tuple[Watch, list[dict[str, Any]]]]:
    """A watch in the block, and afterwards what was found, on rank 0."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        with value.watch(record=record if ranks.first else None) as watched:
            yield watched, found
        if record.exists():
            found += [json.loads(line) for line in record.read_text().splitlines()]


def _trained(
    model: nn.Module, ranks: Ranks, *, late: bool = False, watched: Watch | None = None
) -> list[float]:
    """Weights after steps under DDP in which rank 1 may sleep, in a marked block or not."""
    torch.manual_seed(0)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        if late and step == AT and ranks.rank == 1:
            if watched is not None:
                with watched.marked():
                    time.sleep(ASLEEP)
            else:
                time.sleep(ASLEEP)
        inputs = torch.randn(5, 7, generator=torch.Generator().manual_seed(7 * step + ranks.rank))
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))


def two_watched_ranks(ranks: Ranks, value: RankWatchdog) -> RankFinding:
    """A rank's part: calm, late, late in a marked block, and ranks that differ."""
    found: RankFinding = {"plain": _trained(_model(), ranks)}
    hook = sys.excepthook
    with _watched(ranks, value) as (_, calm):
        found["watched"] = _trained(_model(), ranks)
        found["observed"] = observed()
    found |= {"calm": calm, "left": _left(hook)}
    with _watched(ranks, value) as (_, late):
        _trained(_model(), ranks, late=True)
    with _watched(ranks, value) as (watched, marked):
        _trained(_model(), ranks, late=True, watched=watched)
    found |= {"late": late, "marked": marked, "differ": ""}
    try:
        _value(value, late_seconds=5.0 + ranks.rank).watch().close()
    except InputError as error:
        found["differ"] = str(error)
    return found


def _left(hook: Any) -> list[str]:
    """What a watch that was closed has left in this process."""
    left = [thread.name for thread in threading.enumerate() if thread.name == "modicum watch"]
    left += ["observers"] if observed() else []
    return left + ([] if sys.excepthook is hook else ["excepthook"])


def _at_two_ranks(subject: WatchdogSubject) -> list[RankFinding]:
    return on_two_ranks(two_watched_ranks, _value(subject, **QUICK))


@watchdog_check(proves="alone")
def check_alone_nothing_is_watched(subject: WatchdogSubject) -> None:
    """One process runs as without it, and it says that there is nobody to watch."""
    with _value(subject).watch() as watched, watched.marked():
        assert watched.alone, "it watches one process"
        assert not observed(), "calls of one process are recorded"
    watched.close()  # once more does nothing


@watchdog_check()
def check_impossible_values_are_refused(subject: WatchdogSubject) -> None:
    """A limit that is no positive number is refused."""
    kind = subject if isinstance(subject, type) else type(subject)
    numbers = [name for name, each in kind.model_fields.items() if each.annotation is float]
    for name in numbers:
        for value in (0.0, -1.0, math.nan, math.inf):
            try:
                kind(**{name: value})
                said = ""
            except InputError as error:
                said = str(error)
            assert name in said, f"{name} may be {value}, or the refusal does not name it: {said}"


@watchdog_check(expensive=True)
def check_weights_are_the_same(subject: WatchdogSubject) -> None:
    """Weights after DDP's training are the same to the bit, whether it is watched or not."""
    found = _at_two_ranks(subject)
    assert all(one["watched"] == one["plain"] for one in found), "weights differ"
    assert found[0]["plain"] == found[1]["plain"], "the ranks differ"
    assert all(one["observed"] for one in found), "no calls are seen"


@watchdog_check(expensive=True)
def check_a_calm_run_has_no_alarm(subject: WatchdogSubject) -> None:
    """Of ranks that do the same work nothing is said."""
    calm = _at_two_ranks(subject)[0]["calm"]
    assert not calm, f"it says: {[each['sentence'] for each in calm]}"


@watchdog_check(expensive=True)
def check_a_late_rank_is_named(subject: WatchdogSubject) -> None:
    """Who sleeps while the other waits is named, with collective and place; no run ends."""
    late = _at_two_ranks(subject)[0]["late"]
    assert [(each["rank"], each["ends"]) for each in late] == [(1, False)], f"it says: {late}"
    sentence = late[0]["sentence"]
    assert "has not entered all-reduce" in sentence, f"it does not say in what: {sentence}"
    assert "watchdogs.py:" in sentence, f"it does not say where: {sentence}"


@watchdog_check(expensive=True)
def check_marked_time_is_no_fault(subject: WatchdogSubject) -> None:
    """Who is as late in a marked block, as in an evaluation, is not named."""
    marked = _at_two_ranks(subject)[0]["marked"]
    assert not marked, f"it says: {[each['sentence'] for each in marked]}"


@watchdog_check(expensive=True)
def check_nothing_is_left(subject: WatchdogSubject) -> None:
    """Closed, it leaves no thread, no observer and no hook; it can be begun again."""
    for rank, found in enumerate(_at_two_ranks(subject)):
        assert not found["left"], f"rank {rank} has {found['left']} still"


@watchdog_check(expensive=True)
def check_ranks_that_differ_are_refused(subject: WatchdogSubject) -> None:
    """Ranks with other limits are refused on all of them, naming who differs."""
    for found in _at_two_ranks(subject):
        assert "rank 1" in found["differ"], f"it is not refused, or not named: {found['differ']}"


def two_ranks_under_transformers(ranks: Ranks, value: RankWatchdog) -> RankFinding:
    """A rank's part: `transformers.Trainer` with and without, evaluations marked."""
    import transformers

    class Sleeper(transformers.TrainerCallback):
        """Rank 1 sleeps before a step."""

        def on_step_begin(self, *given: Any, **_: Any) -> None:
            if ranks.rank == 1 and given[1].global_step == AT:
                time.sleep(ASLEEP)

    def train(*callbacks: Any) -> list[float]:
        model = hugging_face_llama()
        rows = _rows()
        train_under_transformers(
            model, rows, callback=callbacks, max_steps=STEPS, learning_rate=1e-2,
            eval_strategy="steps", eval_steps=STEPS // 2, ddp_backend="gloo",
        )  # fmt: skip
        return [float(p.detach().double().sum()) for p in model.parameters()]

    found: RankFinding = {"plain": train()}
    with observing(CallLog()) as log, _watched(ranks, value) as (watched, late):
        found["watched"] = train(watched.callback(), Sleeper())
    return found | {"late": late, "calls": len(log.calls)}


def _rows() -> Tensor:
    return torch.randint(29, (16, 8), generator=torch.Generator().manual_seed(0))


@watchdog_check(expensive=True, proves="transformers")
def check_watches_under_transformers(subject: WatchdogSubject) -> None:
    """A late rank of `transformers.Trainer` is named, and the same bits are trained."""
    hugging_face_llama()  # or it is not installed
    first, second = on_two_ranks(two_ranks_under_transformers, _value(subject, **QUICK))
    assert first["watched"] == first["plain"] == second["plain"], "another model is trained"
    assert first["calls"] >= STEPS, f"{first['calls']} calls of {STEPS} steps were seen"
    assert [each["rank"] for each in first["late"]] == [1], f"it says: {first['late']}"

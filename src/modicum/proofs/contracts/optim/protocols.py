"""What must hold of every method of the slot `protocol`: it asks for trials, and trains nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.errors import InputError
from modicum.optim.protocol import ComparisonProtocol, ProtocolContext, ProtocolRuntime
from modicum.optim.protocol_trials import ProtocolRegime, ProtocolTrial
from modicum.optim.search_grid import SearchGrid
from modicum.optim.transform import GradientTransform
from modicum.proofs.contracts.base import check

ProtocolSubject = type[ComparisonProtocol] | ComparisonProtocol
LossOf = Callable[[ProtocolTrial], float]

protocols_check = partial(check, "optim", slot="protocol")
SPACE = {
    "learning_rate": SearchGrid((1e-3, 3e-3, 9e-3), 3e-3, "log"),
    "weight_decay": SearchGrid((0.0, 0.1, 0.2), 0.1, "linear", least=0.0),
    "shape": SearchGrid(("line", "cosine"), "line"),
}
REGIMES = tuple(ProtocolRegime(n, ratio) for n in (100, 200) for ratio in (0.5, 1.0, 2.0, 4.0))
MOST = 5000  # trials, after which a protocol that asks for more has no end


def _context(**sides: Mapping[str, SearchGrid]) -> ProtocolContext:
    return ProtocolContext(sides or {"one": SPACE, "other": SPACE}, REGIMES)


def _bound(subject: ProtocolSubject, context: ProtocolContext | None = None) -> ProtocolRuntime:
    value = subject if isinstance(subject, ComparisonProtocol) else subject.tiny()
    return value.bind(context or _context())


def _loss(trial: ProtocolTrial) -> float:
    """A bowl around a rate that moves with size, with noise that is the seed's alone."""
    rate = math.log(trial.settings["learning_rate"] / 4e-3) + trial.regime.parameters / 500
    worse = 0.3 * rate**2 + (trial.settings["weight_decay"] - 0.1) ** 2
    worse += 0.05 * (trial.settings["shape"] == "line")
    return 40 * trial.regime.tokens**-0.4 + 1 + worse + 0.001 * math.sin(7.0 * trial.seed)


def _loss_or(losses: Mapping[str, float], trial: ProtocolTrial) -> float:
    """The loss, unless the trial's shape has one of its own."""
    return losses.get(trial.settings["shape"], _loss(trial))


def _ended(
    runtime: ProtocolRuntime, loss_of: LossOf = _loss, *, backwards: bool = False
) -> list[ProtocolTrial]:
    """Every trial until the protocol asks for no more."""
    while wave := runtime.ask():
        for trial in reversed(wave) if backwards else wave:
            runtime.tell(trial, loss_of(trial))
        assert len(runtime.results) < MOST, f"it asks for more than {MOST} trials"
    return [trial for trial, _ in runtime.results]


def _refused(call: Callable[[], Any], what: str) -> None:
    try:
        call()
    except InputError:
        return
    raise AssertionError(what)


@protocols_check()
def check_is_no_optimizer(subject: ProtocolSubject) -> None:
    """It is neither an optimizer nor a transform of gradients, and claims no trait of a run."""
    kind: type[object] = subject if isinstance(subject, type) else type(subject)
    assert not issubclass(kind, OptimizerMethod | GradientTransform), "it is an optimizer"
    assert not subject.info.traits, "it says that it does something to a run"


@protocols_check()
def check_it_ends(subject: ProtocolSubject) -> None:
    """On losses that have a least one it asks for no more after a while, and for both sides."""
    trials = _ended(_bound(subject))
    assert {trial.side for trial in trials} == {"one", "other"}, "it has not tried both sides"


@protocols_check()
def check_no_trial_twice(subject: ProtocolSubject) -> None:
    """It asks for no trial twice."""
    keys = [trial.key for trial in _ended(_bound(subject))]
    assert len(set(keys)) == len(keys), "a trial was asked for twice"


@protocols_check()
def check_sides_are_treated_alike(subject: ProtocolSubject) -> None:
    """Sides with the same grids and the same losses are asked for the same trials."""
    found: dict[str, set[str]] = {"one": set(), "other": set()}
    for trial in _ended(_bound(subject)):
        found[trial.side].add(json.dumps({**trial.to_json(), "side": ""}, sort_keys=True))
    assert found["one"] == found["other"], "one side has other trials than the other"


@protocols_check()
def check_settings_are_complete(subject: ProtocolSubject) -> None:
    """A trial has a value for each hyper-parameter of its side, in one of the regimes."""
    for trial in _ended(_bound(subject)):
        assert trial.settings.keys() == SPACE.keys(), "a hyper-parameter is missing"
        assert trial.settings["shape"] in ("line", "cosine"), "a value that is none of the list"
        assert trial.settings["weight_decay"] >= 0, "a value beyond what is allowed"
        assert trial.regime in REGIMES, "a regime that is none of the context's"


@protocols_check()
def check_seeds_that_judge_are_fresh(subject: ProtocolSubject) -> None:
    """Trials that judge have seeds that none that tunes has, the same on all sides."""
    trials = _ended(_bound(subject))
    seeds = {
        part: {side: {t.seed for t in trials if (t.part, t.side) == (part, side)}
        for side in ("one", "other")} for part in ("tune", "judge")
    }  # fmt: skip
    assert seeds["judge"]["one"], "nothing was judged"
    assert seeds["judge"]["one"] == seeds["judge"]["other"], "sides have other seeds"
    assert not seeds["judge"]["one"] & seeds["tune"]["one"], "a seed tunes and judges"


@protocols_check()
def check_order_changes_nothing(subject: ProtocolSubject) -> None:
    """In another order the results of each wave amount to the same report."""
    reports = []
    for backwards in (False, True):
        runtime = _bound(subject)
        _ended(runtime, backwards=backwards)
        reports.append(runtime.report().to_json())
    assert reports[0] == reports[1], "the report depends on the order of results"


@protocols_check()
def check_resumes(subject: ProtocolSubject) -> None:
    """From its state in JSON, taken amid a wave, it asks for what is left, and ends the same."""
    complete, begun, resumed = (_bound(subject) for _ in range(3))
    _ended(complete)
    for trial in begun.ask()[:-1]:
        begun.tell(trial, _loss(trial))
    for trial in begun.ask()[:2]:
        begun.tell(trial, _loss(trial))
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict(), allow_nan=False)))
    left = [trial.key for trial in resumed.ask()]
    assert left == [trial.key for trial in begun.ask()], "it asks for other trials"
    _ended(resumed)
    assert resumed.report().to_json() == complete.report().to_json(), "it ends otherwise"


@protocols_check()
def check_divergence_is_the_worst(subject: ProtocolSubject) -> None:
    """Losses that are no finite numbers are survived, and settings that have them are not best."""
    for bad in (math.nan, math.inf):
        runtime = _bound(subject)
        _ended(runtime, partial(_loss_or, {"line": bad}))
        judged = [r.loss for t, r in runtime.results if t.part == "judge" and t.side == "one"]
        assert any(map(math.isfinite, judged)), "settings that diverge were judged alone"
        json.dumps(runtime.report().to_json(), allow_nan=False)
    hopeless = _bound(subject)
    _ended(hopeless, lambda trial: math.nan)
    json.dumps(hopeless.report().to_json(), allow_nan=False)


@protocols_check()
def check_report_is_plain(subject: ProtocolSubject) -> None:
    """The report is JSON values, before the first result, in between and at the end."""
    runtime = _bound(subject)
    json.dumps(runtime.report().to_json(), allow_nan=False)
    for trial in runtime.ask():
        runtime.tell(trial, _loss(trial), curve=((0.5, 3.0), (1.0, 2.0)), metrics={"seconds": 1.0})
    json.dumps(runtime.report().to_json(), allow_nan=False)
    _ended(runtime)
    found = runtime.report().to_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found, "the report is no JSON value"


@protocols_check()
def check_what_was_not_asked_is_refused(subject: ProtocolSubject) -> None:
    """A trial that was not asked for, or is known, is refused, and so is another's state."""
    runtime = _bound(subject)
    trial = runtime.ask()[0]
    other = ProtocolTrial("third", trial.regime, trial.settings, trial.seed, trial.part)
    _refused(lambda: runtime.tell(other, 1.0), "a side that takes no part was taken")
    runtime.tell(trial, 1.0)
    _refused(lambda: runtime.tell(trial, 1.0), "a result was taken twice")
    stranger = _bound(subject, _context(one=SPACE, third=SPACE))
    _refused(lambda: stranger.load_state_dict(runtime.state_dict()), "took another's state")


@protocols_check()
def check_one_sided_tuning_is_noted(subject: ProtocolSubject) -> None:
    """Where one side has nothing to be tuned over, the report's notes name it."""
    default = {name: grid.fixed(grid.default) for name, grid in SPACE.items()}
    found = {}
    for name, space in (("left", default), ("other", SPACE)):
        runtime = _bound(subject, _context(tuned=SPACE, **{name: space}))
        _ended(runtime)
        found[name] = [note for note in runtime.report().notes if "default" in note]
    assert any("left" in note for note in found["left"]), "nothing says that a side was not tuned"
    assert not found["other"], "it says so of sides that were"

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.comparison import Outcome, trial_name
from modicum.core.errors import InputError

FLOATS = st.floats(allow_nan=False)
OUTCOMES = st.builds(
    Outcome,
    st.sampled_from(["finished", "diverged", "out_of_memory", "crashed", "refused"]),
    FLOATS,
    st.dictionaries(st.text(), FLOATS),
    st.dictionaries(st.text(), FLOATS),
    st.none() | st.integers(0),
    st.none() | st.floats(0, 1e9),
    st.dictionaries(st.text(), st.integers(0)),
    st.text(),
    st.text(),
    st.text(),
)


@given(OUTCOMES)
def test_an_outcome_survives_strict_json(outcome: Outcome) -> None:
    text = json.dumps(outcome.to_json(), allow_nan=False)
    assert Outcome.from_json(json.loads(text)) == outcome


@given(OUTCOMES)
def test_only_finite_losses_are_losses(outcome: Outcome) -> None:
    assert (outcome.loss is not None) == (outcome.status == "finished")
    assert outcome.loss is None or math.isfinite(outcome.loss)
    expected = {"finished": outcome.loss, "diverged": math.inf}
    assert outcome.score == expected.get(outcome.status)
    assert outcome.figure("loss") == outcome.score


def test_a_test_loss_is_a_figure_of_finished_trials_alone() -> None:
    test = {"wiki": 1.0, "news": math.nan}
    finished = Outcome("finished", 2.0, test)
    assert [finished.figure(name) for name in ("wiki", "news", "none")] == [1.0, math.inf, None]
    assert Outcome("crashed", 2.0, test).figure("wiki") is None
    assert Outcome("diverged", test=test).figure("wiki") == math.inf


def test_what_is_no_outcome_is_refused() -> None:
    with pytest.raises(InputError, match=r"no such status.*'finsihed'.*mean 'finished'"):
        Outcome("finsihed")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a finished trial has a loss"):
        Outcome("finished")
    for values in ({}, {"status": "finished"}, {"status": "crashed", "test": 1, "metrics": {}}):
        with pytest.raises(InputError):
            Outcome.from_json(values)


@given(st.text(min_size=1), st.dictionaries(st.text(), st.integers() | st.text()), st.integers(0))
def test_a_trial_s_name_is_a_file_s_and_of_all_it_is_called_with(
    side: str, settings: dict[str, object], seed: int
) -> None:
    name = trial_name(side, settings, seed, "tune")
    assert name.replace("-", "").replace("_", "").isalnum()
    assert len(name) < 120
    backwards = dict(reversed(list(settings.items())))
    assert trial_name(side, backwards, seed, "tune") == name
    others = {
        trial_name(side, settings, seed + 1, "tune"),
        trial_name(side, settings, seed, "judge"),
        trial_name(side + "x", settings, seed, "tune"),
        trial_name(side, settings | {"more": 1}, seed, "tune"),
    }
    assert name not in others or settings == settings | {"more": 1}

"""Forms under optimizers that look at matrices, or keep codes: resumed, and on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from tests.trainer.test_ranks import column, outcome, recipe_of, trains

from modicum.core.ranks.ranks import Ranks

FORMS: dict[str, dict[str, Any]] = {
    "monarch": {"blocks": 2},
    "lost": {"share": 0.6, "channels": 0.1},
    "sst": {"rank": 9, "interval": 3},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {},
    "galore": {"rank": 3, "update_gap": 2},
    "adamw8bit": {},
}
PAIRS = [(form, optimizer) for form in FORMS for optimizer in OPTIMIZERS]


def values(data: Path, form: str, optimizer: str, **sections: Any) -> dict[str, Any]:
    return recipe_of(
        data,
        training={"schedule": "constant"},
        linear={"method": form, **FORMS.get(form, {})},
        optimizer={"method": optimizer, **OPTIMIZERS[optimizer]},
        **sections,
    )


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize(("form", "optimizer"), PAIRS, ids=" by ".join)
def test_a_form_is_trained_resumed_and_sharded(
    pool: Pool, questions: Path, tmp_path: Path, form: str, optimizer: str
) -> None:
    made = values(questions, form, optimizer)
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    losses = column(tmp_path / "run", "loss")
    assert losses[-1] < losses[0]
    assert trains(Ranks(), made, tmp_path / "stopped", (0, 7)).startswith("4: ")
    assert trains(Ranks(), made, tmp_path / "stopped") == "done"
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "run")
    zero = values(questions, form, optimizer, parallel={"strategy": "zero"})
    assert pool.run(trains, zero, tmp_path / "zero", ranks=2) == ["done"] * 2
    assert column(tmp_path / "zero", "loss") == pytest.approx(losses, rel=1e-3)

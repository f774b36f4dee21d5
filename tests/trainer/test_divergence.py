"""What the refusal of a run that diverged advises: what could be at fault."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from modicum.recipe import Recipe
from modicum.trainer.divergence import TrainingDiverged, refuse_divergence

FP16 = {"method": "dense_sums", "dtype": "fp16", "scale": 2.0**24}
BF16 = {"method": "dense_sums", "dtype": "bf16"}


def refusal(comm: Any, ranks: int, skipped: int) -> TrainingDiverged:
    plan: Any = SimpleNamespace(recipe=Recipe(comm=comm), ranks=ranks, steps=9)
    with pytest.raises(TrainingDiverged) as caught:
        refuse_divergence(plan, 9, skipped, updated=False)
    return caught.value


@pytest.mark.parametrize("skipped", [9, 1])
def test_what_overflows_on_the_wire_is_named_with_its_scale(skipped: int) -> None:
    said = refusal(FP16, 2, skipped)
    assert "lower comm.scale, or take comm.dtype: bf16" in said.problem
    assert "training.learning_rate" in said.problem
    if skipped > 3:
        assert (said.field, said.value) == ("comm.scale", 2.0**24)
    for comm, ranks in ((FP16, 1), (BF16, 2), (None, 2)):
        said = refusal(comm, ranks, skipped)
        assert "comm.scale" not in str(said)
        assert said.field in ("training.learning_rate", None)

"""A difference that is no number is seen, whichever weight has it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from modicum.core.contracts.catalog import find
from modicum.proofs.base import ProofRun
from modicum.proofs.optim.muon import as_pytorch


def test_one_weight_that_is_no_number_is_not_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = []
    steps, original = [0], torch.optim.Muon.step

    def step(self: torch.optim.Muon, closure: Any = None) -> None:
        original(self, closure)
        steps[0] += 1
        if steps[0] % 20 == 0:
            self.param_groups[0]["params"][-1].data.fill_(math.nan)

    monkeypatch.setattr(torch.optim.Muon, "step", step)
    as_pytorch(ProofRun(find("muon"), null=False, full=False, listener=events.append))
    assert [event["passed"] for event in events if event["event"] == "criterion"] == [False, False]

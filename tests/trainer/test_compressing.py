"""What a run holds while it makes its model smaller, next to what its plan says of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.conftest import full

import modicum
from modicum.core.machine.memory import TensorMeter
from modicum.recipe import Recipe
from modicum.trainer import compressing, setup

LORA = {"adapter": {"method": "lora", "rank": 2}, "training": {"precision": "bf16"}}


@pytest.fixture(scope="module")
def base(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    made = full(dataset, training={"steps": 1}, data={"sequence_length": 128})
    made["model"] = {"layers": 3, "width": 192, "heads": 4, "vocabulary_size": 512}
    modicum.train(modicum.plan(Recipe(**made)), folder / "run")
    return folder / "run" / "model"


def asked(base: Path, dataset: Path, compress: dict[str, Any], **sections: Any) -> dict[str, Any]:
    made = full(dataset, **{"training": {"steps": 1}, **sections})
    made["training"] |= {"batch_size": 16, "micro_batch_size": 16, "steps": 1, "compile": "none"}
    made["data"] |= {"sequence_length": 128}
    return made | {"model": {"path": str(base)}, "compress": {**compress, "examples": 32}}


@pytest.mark.parametrize(
    ("compress", "sections"),
    [
        ({"method": "fwsvd"}, {}),
        ({"method": "fwsvd"}, LORA),
        ({"method": "structured_pruning"}, {}),
        ({"method": "structured_pruning"}, LORA),
    ],
)
def test_the_dense_model_and_a_pass_over_data_are_in_the_plan(
    base: Path,
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compress: dict[str, Any],
    sections: dict[str, Any],
) -> None:
    peaks: list[int] = []
    unmeasured = setup.with_base_compressed

    def measured(*given: Any) -> Any:
        with TensorMeter("cpu") as meter:
            found = unmeasured(*given)
        assert meter.peak is not None
        peaks.append(meter.peak)
        return found

    monkeypatch.setattr(setup, "with_base_compressed", measured)
    plan = modicum.plan(Recipe(**asked(base, dataset, compress, **sections)))
    modicum.train(plan, tmp_path / "run")
    foreseen = plan.prediction.peak_before
    assert foreseen > plan.prediction.total * (2 if sections else 4)
    assert 0.97 * peaks[0] < foreseen < 1.2 * peaks[0]
    row = json.loads((tmp_path / "run" / "plan.jsonl").read_text().splitlines()[0])
    assert row["prediction"]["peak_before"] == foreseen


def test_a_base_in_half_precision_is_held_so(
    base: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []
    materialise = compressing.materialise

    def noted(model: torch.nn.Module, device: torch.device) -> None:
        seen.extend({parameter.dtype for parameter in model.parameters()})
        materialise(model, device)

    monkeypatch.setattr(compressing, "materialise", noted)
    made = asked(base, dataset, {"method": "fwsvd"}, **LORA)
    modicum.train(modicum.plan(Recipe(**made)), tmp_path / "run")
    assert seen == [torch.bfloat16]

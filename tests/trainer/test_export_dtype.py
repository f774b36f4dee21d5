"""The dtype of what a training of all weights exports: the base's own, or the recipe's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.conftest import full, lora, run
from tests.trainer.test_precision import half, in_dtype

import modicum
from modicum.core.errors import InputError
from modicum.models import huggingface, saving
from modicum.planner.precision import EXPORT, exported_dtype
from modicum.recipe import Recipe
from modicum.trainer import continued
from modicum.verify import verify_export

__all__ = ["half"]  # a fixture


@pytest.mark.parametrize(
    ("dtypes", "asked", "expected"),
    [
        ({"BF16"}, "auto", "bfloat16"),
        ({"F16"}, "auto", "float16"),
        ({"F32"}, "auto", "float32"),
        ({"F64"}, "auto", "float32"),
        ({"BF16", "F32"}, "auto", "float32"),
        ((), "auto", "float32"),
        ({"BF16"}, "float32", "float32"),
        ((), "float16", "float16"),
    ],
)
def test_auto_is_what_the_files_hold(dtypes: set[str], asked: str, expected: str) -> None:
    assert exported_dtype(Recipe(export={"dtype": asked}), dtypes) == expected


def stored(folder: Path) -> tuple[set[torch.dtype], str]:
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    return {each.dtype for each in tensors.values()}, config["torch_dtype"]


def short(dataset: Path, base: Path, **sections: Any) -> dict[str, Any]:
    return full(dataset, training={"steps": 3}, **sections) | {"model": {"path": str(base)}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_run_exports_what_its_base_is(dataset, finished, tmp_path, dtype):
    name = str(dtype).removeprefix("torch.")
    base = in_dtype(finished, tmp_path / "base", dtype)
    run(short(dataset, base), tmp_path / "run")
    assert stored(tmp_path / "run" / "model") == ({dtype}, name)
    rows = json.loads((tmp_path / "run" / "plan.jsonl").read_text().splitlines()[0])["choices"]
    assert [row["value"] for row in rows if row["field"] == EXPORT] == [name]
    done = verify_export(tmp_path / "run", prompts=2, tokens=4)
    assert done.passed
    found = next(check for check in done.checks if check["check"] == "exported")
    assert found["dtype"] == name
    assert 0 < found["error"] < found["allowed"]
    # Another dtype changes nothing that is computed, so the same run goes with it.
    continued(Recipe(**short(dataset, base, export={"dtype": "float32"})), tmp_path / "run")


def test_float32_keeps_every_bit(dataset, half, tmp_path):
    run(short(dataset, half, export={"dtype": "float32"}), tmp_path / "run")
    assert stored(tmp_path / "run" / "model") == ({torch.float32}, "float32")
    done = verify_export(tmp_path / "run", prompts=2, tokens=4)
    assert [check["error"] for check in done.checks if "error" in check] == [0]


def test_what_is_not_rounded_is_refused(dataset, finished):
    recipe = Recipe(**lora(finished / "model", dataset, export={"dtype": "bfloat16"}))
    with pytest.raises(InputError, match=r"export\.dtype: an adapter is exported in fp32"):
        modicum.plan(recipe)
    images = Recipe(task={"method": "images"}, export={"dtype": "float16"})
    with pytest.raises(InputError, match=r"export\.dtype: models of this task are"):
        modicum.plan(images)


def test_a_weight_beyond_fp16_is_named(finished, tmp_path):
    model = huggingface.load(finished / "model")
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[0] = 1e5
    with pytest.raises(
        InputError, match=r"export\.dtype: the weight model\.norm\.weight is beyond"
    ):
        saving.save(model, tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    saving.save(model, tmp_path / "out", dtype=torch.bfloat16)
    assert stored(tmp_path / "out") == ({torch.bfloat16}, "bfloat16")

"""Planted faults in what a run of a classifier exported are found; clean runs pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from classifiers import base_folder, rows, write_rows  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file
from tests.verify.conftest import run
from tests.verify.test_export import edit, found

from modicum.core.errors import InputError
from modicum.models import convnet, saving, traced_cache
from modicum.serve import load_adapted
from modicum.verify import verify_export

pytestmark = pytest.mark.expensive
ADAPTER = {"method": "lora", "rank": 4}


@pytest.fixture(autouse=True, scope="module")
def _traced_here() -> Any:
    """Traces are made in this process: to start another takes longer than all else."""

    def here(request: Any, wanted: list[Any]) -> Any:
        asked = {"build": request.build, "arguments": dict(request.arguments), "wanted": wanted}
        return json.loads(json.dumps(traced_cache.answer(asked)))["passes"]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(traced_cache, "_traced_apart", here)
        yield


def values(folder: Path, model: str, **sections: Any) -> dict[str, Any]:
    """A recipe of a classifier on `folder`'s rows in plain values."""
    return {
        "task": {"method": "text_classes"},
        "model": {"path": str(folder / model)},
        "data": {
            "path": str(folder / "data.jsonl"), "sequence_length": 16, "validation_fraction": 0.25,
        },
        "training": {
            "steps": 12, "batch_size": 16, "micro_batch_size": 8, "learning_rate": 5e-3,
        },
        **sections,
    }  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, an encoder and a decoder."""
    folder = tmp_path_factory.mktemp("classes")
    write_rows(folder / "data.jsonl", rows())
    for name in ("bert", "gpt2"):
        base_folder(folder / name, name)
    return folder


@pytest.fixture(scope="module")
def full(place: Path) -> Path:
    return run(values(place, "bert"), place / "full")


@pytest.fixture(scope="module")
def adapted(place: Path) -> Path:
    return run(values(place, "bert", adapter=ADAPTER), place / "adapted")


def merged(done: Path, folder: Path, *, scale: float = 1.0, dtype: Any = torch.float32) -> Path:
    """A run's adapter in its base, as `modicum merge` writes it, but scaled or rounded."""
    model, adapter = load_adapted(done)
    with torch.no_grad():
        for name, parameter in adapter.state_dict().items():
            if name.endswith(".B"):
                parameter.mul_(scale)
    adapter.merge()
    adapter.detach()
    model.to(dtype)
    return saving.save(model, folder, files=sorted((done / "tokenizer").glob("*")))


def changed(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """A model folder whose tensors are others."""
    file = folder / "model.safetensors"
    tensors = {name: change(name, tensor) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", ["bert-full", "bert-lora", "gpt2-full", "gpt2-lora"])
def test_clean_runs_pass_and_nothing_is_written(
    place: Path, full: Path, adapted: Path, kind: str
) -> None:
    model, way = kind.split("-")
    sections = {"adapter": ADAPTER} if way == "lora" else {}
    made = {"bert-full": full, "bert-lora": adapted}.get(kind)
    done = made or run(values(place, model, **sections), place / kind)
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
    seen = verify_export(done)
    assert seen.findings == []
    asked, exported, *joined = seen.checks
    assert asked == {"check": "rows", "of": "validation", "count": 16}
    assert exported["error"] < 1e-5
    assert exported["other_classes"] == 0
    assert [check["check"] for check in joined] == (["merged"] if way == "lora" else [])
    if way == "lora":
        assert exported["adapter_changes"] > 1e-2
        assert joined[0]["error"] < 1e-5
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == before


def test_folders_made_of_a_run_pass(adapted: Path, full: Path, tmp_path: Path) -> None:
    good = merged(adapted, tmp_path / "merged")
    peft = Path(shutil.copytree(adapted / "adapter", tmp_path / "peft"))
    for folder in (good, peft, adapted):
        assert verify_export(adapted, against=folder).findings == [], folder
    for folder in (full, full / "model"):
        assert verify_export(full, against=folder).findings == [], folder
    rounded = verify_export(adapted, against=merged(adapted, tmp_path / "bf", dtype=torch.bfloat16))
    assert rounded.findings == []
    assert rounded.checks[-1]["dtype"] == "bfloat16"
    assert 1e-4 < rounded.checks[-1]["error"] < rounded.checks[-1]["allowed"]


def test_the_same_classes_in_another_order_pass_and_a_wrong_order_is_found(
    full: Path, tmp_path: Path
) -> None:
    other = {"id2label": {"0": "plants", "1": "animals"}, "label2id": {"plants": 0, "animals": 1}}

    def turned(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flip(0).contiguous() if name.startswith("classifier.") else tensor

    both = changed(Path(shutil.copytree(full / "model", tmp_path / "both")), turned)
    edit(both / "config.json", **other)
    assert verify_export(full, against=both).findings == []
    names = Path(shutil.copytree(full / "model", tmp_path / "names"))
    edit(names / "config.json", **other)
    done = verify_export(full, against=names)
    assert found(done) == {("labels", "against")}
    assert "16 of 16 rows get another class" in done.findings[0].found
    strange = Path(shutil.copytree(full / "model", tmp_path / "strange"))
    edit(strange / "config.json", id2label={"0": "LABEL_0", "1": "LABEL_1"})
    done = verify_export(full, against=strange)
    assert found(done) == {("labels", "against")}
    assert done.findings[0].expected == "'animals', 'plants'"
    assert done.findings[0].found == "'LABEL_0', 'LABEL_1'"


def test_a_wrong_merge_and_an_adapter_that_is_not_applied_are_found(
    adapted: Path, tmp_path: Path
) -> None:
    for scale in (0.5, 0.0):
        folder = merged(adapted, tmp_path / f"scale-{scale}", scale=scale)
        done = verify_export(adapted, against=folder)
        assert found(done) == {("logits", "against")}
        assert done.checks[1]["error"] < 1e-5  # what the run itself wrote
    # What the adapter changes is more: the head is a part of it, and is in the folder.
    change = done.checks[-1]["adapter_changes"]
    assert 0.05 * change < done.checks[-1]["error"] < change
    config = Path(shutil.copytree(adapted, tmp_path / "run")) / "adapter" / "adapter_config.json"
    edit(config, lora_alpha=json.loads(config.read_text())["lora_alpha"] * 2)
    assert found(verify_export(config.parents[1])) == {
        ("logits", "exported"), ("logits", "merged"),
    }  # fmt: skip


def test_another_head_and_none_are_found(place: Path, full: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(full / "model", tmp_path / "head"))
    changed(folder, lambda name, tensor: tensor * (1.1 if name == "classifier.weight" else 1))
    assert found(verify_export(full, against=folder)) == {("logits", "against")}
    done = verify_export(full, against=place / "bert")
    assert found(done) == {("head", "against")}
    assert "classifier.weight" in done.findings[0].found


def test_another_tokenizer_and_another_padding_are_found(full: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(full / "model", tmp_path / "tokens"))
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words["cat"], words["dog"] = words["dog"], words["cat"]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert found(verify_export(full, against=folder)) == {("tokenizer", "against")}
    folder = Path(shutil.copytree(full / "model", tmp_path / "padding"))
    edit(folder / "config.json", pad_token_id=7)
    assert ("padding", "against") in found(verify_export(full, against=folder))


def test_a_folder_without_a_model_is_refused(full: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--against: no such folder"):
        verify_export(full, against=tmp_path / "none")
    with pytest.raises(InputError, match="holds neither a run nor a model"):
        verify_export(full, against=tmp_path)


def test_images_are_verified_too(tmp_path: Path) -> None:
    task = {"method": "images", "images": 64, "held_out": 16, "classes": 3, "widths": [8, 8]}
    training = {"steps": 3, "batch_size": 8, "learning_rate": 1e-2}
    done = run({"task": task, "training": training}, tmp_path / "run")
    seen = verify_export(done, prompts=8)
    assert seen.findings == []
    assert seen.checks[0] == {"check": "rows", "of": "validation", "count": 8}
    assert seen.checks[1]["error"] == 0.0
    folder = Path(shutil.copytree(done / "model", tmp_path / "other"))
    changed(folder, lambda name, tensor: tensor * 1.2)
    seen = verify_export(done, against=folder)
    assert found(seen) == {("logits", "against")}
    assert verify_export(done, against=done).passed


def test_sequences_are_verified_too(tmp_path: Path) -> None:
    task = {"method": "sequences", "sequences": 64, "held_out": 16, "length": 5, "width": 8}
    training = {"steps": 3, "batch_size": 8, "learning_rate": 1e-2}
    done = run({"task": task, "training": training}, tmp_path / "run")
    seen = verify_export(done, prompts=8)
    assert seen.findings == []
    assert seen.checks[0] == {"check": "rows", "of": "validation", "count": 8}
    assert [(check["check"], check["error"]) for check in seen.checks[1:]] == [("exported", 0.0)]
    folder = Path(shutil.copytree(done / "model", tmp_path / "other"))
    changed(folder, lambda name, tensor: tensor * (1.0 if "head" in name else 1.2))
    assert found(verify_export(done, against=folder)) == {("logits", "against")}
    assert verify_export(done, against=done).passed


def test_adapted_images_are_verified(tmp_path: Path) -> None:
    config = convnet.ConvNetConfig(widths=(8, 8), norm="group")
    convnet.save(convnet.create(config, 0), tmp_path / "base")
    task = {"method": "images", "images": 32, "held_out": 16, "path": str(tmp_path / "base")}
    adapter = {"method": "lora", "rank": 2, "targets": ["conv"], "also": ["norm", "head"]}
    training = {"steps": 3, "batch_size": 8, "learning_rate": 1e-2}
    done = run({"task": task, "adapter": adapter, "training": training}, tmp_path / "run")
    seen = verify_export(done, prompts=8)
    assert seen.findings == []
    assert seen.checks[1]["error"] < 1e-5
    weights = done / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({n: 2 * t if "head" in n else t for n, t in tensors.items()}, weights)
    assert ("logits", "exported") in found(verify_export(done, prompts=8))


def test_own_images_are_verified_by_the_names_of_their_classes(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for number, label in enumerate(("cats", "dogs")):
        (tmp_path / "images" / label).mkdir(parents=True)
        for n in range(6):
            pillow.new("L", (8, 8), 100 * number + 9 * n).save(
                tmp_path / "images" / label / f"{n}.png"
            )
    task = {"method": "images", "data_path": str(tmp_path / "images"), "size": 8, "colour": "grey",
            "validation_fraction": 0.5, "widths": [4]}  # fmt: skip
    training = {"steps": 2, "batch_size": 4, "learning_rate": 1e-2}
    done = run({"task": task, "training": training}, tmp_path / "run")
    assert verify_export(done).passed
    folder = Path(shutil.copytree(done / "model", tmp_path / "other"))
    edit(folder / "images.json", classes=["dogs", "cats"])
    assert found(verify_export(done, against=folder)) == {("labels", "against")}

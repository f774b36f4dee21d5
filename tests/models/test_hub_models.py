"""Models of the hub: how they are spelled, what is downloaded when, what is said where it fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_cache import COMMIT, StandIn, stand_in
from huggingface_hub import constants, errors
from safetensors.torch import save_file

from modicum.core.errors import InputError
from modicum.models.hub_models import HubModel, commit_of, download_weights, hub_folder
from modicum.models.safetensors_file import INDEX

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
OTHERS = ("pytorch_model.bin", "consolidated.safetensors", "own.py", "README.md")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A repository of two shards with much that is not read."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    for name in SHARDS:
        save_file({name: torch.zeros(2)}, folder / name)
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: name for name in SHARDS}}))
    for name in OTHERS:
        (folder / name).write_bytes(b"")
    return stand_in(monkeypatch, folder, tmp_path / "cache")


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("hub:a/b", HubModel("a/b")),
        ("hub:a-1/b.c,revision=refs/pr/1", HubModel("a-1/b.c", "refs/pr/1")),
    ],
)
def test_spellings(spelling: str, expected: HubModel) -> None:
    assert HubModel.parsed(spelling) == expected
    assert expected.spelling == spelling


@pytest.mark.parametrize("wrong", ["hub:", "hub:gpt2", "hub:a/b/c", "hub:a/b,split=x", "hub:./a"])
def test_other_spellings_are_refused(wrong: str) -> None:
    with pytest.raises(InputError, match=r"names no model of the hub.*hub:OWNER/NAME,revision="):
        hub_folder(wrong)


def test_a_plan_downloads_no_weights_and_a_run_safetensors_alone(hub: StandIn) -> None:
    folder = hub_folder("hub:a/b")
    assert names(folder) == {"config.json", "tokenizer.json"}
    assert not hub.downloaded(SHARDS[0])
    assert download_weights(f"hub:a/b,revision={folder.name}") == folder
    assert names(folder) == {"config.json", "tokenizer.json", INDEX, *SHARDS}
    assert not any(map(hub.downloaded, OTHERS))


def test_code_is_downloaded_where_it_is_asked_for(hub: StandIn) -> None:
    assert "own.py" in names(hub_folder("hub:a/b", code=True))


def test_a_template_for_tools_is_downloaded_into_its_folder(hub: StandIn) -> None:
    templates = hub.folder / "additional_chat_templates"
    templates.mkdir()
    for name in ("tool_use.jinja", "README.md"):
        (templates / name).write_text("")
    assert names(hub_folder("hub:a/b") / templates.name) == {"tool_use.jinja"}


def test_an_interrupted_download_is_completed(hub: StandIn) -> None:
    folder = hub_folder("hub:a/b")
    shutil.copyfile(hub.folder / SHARDS[0], folder / SHARDS[0])
    assert names(hub_folder("hub:a/b")) >= {INDEX, *SHARDS}


def test_pickles_are_not_read(hub: StandIn) -> None:
    for name in (INDEX, *SHARDS):
        (hub.folder / name).unlink()
    with pytest.raises(InputError, match=r"no model\.safetensors, and pickled weights are not"):
        download_weights("hub:a/b")
    (hub.folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config\.json"):
        hub_folder("hub:a/b")


def response(kind: type[Exception]) -> Exception:
    made = kind.__new__(kind)
    made.args = ("no",)
    return made


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (response(errors.RepositoryNotFoundError), "no such model, or it is private"),
        (response(errors.GatedRepoError), "asks for your consent"),
        (response(errors.RevisionNotFoundError), "no such revision"),
        (errors.LocalEntryNotFoundError("x"), "cannot be reached, and its cache"),
        (ValueError("two\nlines."), "cannot load it: two lines "),
    ],
)
def test_errors_are_one_sentence(hub: StandIn, error: Exception, message: str) -> None:
    hub.error = error
    with pytest.raises(InputError, match=message) as raised:
        hub_folder("hub:a/b,revision=main")
    assert "(found: 'hub:a/b,revision=main')" in str(raised.value)


def offline(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


def test_the_cache_serves_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the library itself, of a cache as it lays one out."""
    offline(monkeypatch, tmp_path)
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    save_file({"x": torch.zeros(2)}, snapshot / "model.safetensors")
    assert hub_folder("hub:a/b") == snapshot.resolve()
    assert download_weights(f"hub:a/b,revision={COMMIT}") == snapshot.resolve()
    with pytest.raises(InputError, match=r"not asked, as HF_HUB_OFFLINE is set, and its cache"):
        hub_folder("hub:a/other")


def test_a_commit_is_one_of_the_same_model() -> None:
    commit: Any = f"hub:a/b,revision={COMMIT}"
    assert commit_of("hub:a/b", commit) == commit_of("hub:a/b,revision=main", commit) == COMMIT
    for asked, other in (
        ("hub:a/c", commit),
        (commit, commit),
        ("hub:a/b", "hub:a/b"),
        ("/a/b", commit),
    ):
        assert commit_of(asked, other) is None


@pytest.mark.parametrize("named", ["*", "../secret.safetensors", "pytorch_model.bin", 7, ["x"]])
def test_an_index_names_safetensors_in_its_folder_alone(hub: StandIn, named: Any) -> None:
    (hub.folder / INDEX).write_text(json.dumps({"weight_map": {"a": named}}))
    with pytest.raises(InputError, match="names what is no file of safetensors in its folder"):
        download_weights("hub:a/b")
    assert not any(map(hub.downloaded, OTHERS))


def test_a_fresh_process_says_that_the_hub_cannot_be_reached(tmp_path):
    # Here other tests have imported all parts of the hub's library; a command has not.
    command = [sys.executable, "-m", "modicum", "plan", str(tmp_path / "recipe.yaml")]
    (tmp_path / "recipe.yaml").write_text("model: {path: 'hub:no/such'}\n", encoding="utf-8")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "hub:no/such" in done.stderr
    assert "Traceback" not in done.stderr

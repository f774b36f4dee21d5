"""Code of a model's folder: run by a flag, with a warning that names its files, and never else."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import add_tokenizer, config_json
from safetensors.torch import save_file

import modicum
from modicum.core.errors import InputError
from modicum.models import huggingface
from modicum.models.transformers import kinds, private, trusted
from modicum.models.transformers.trusted import named_files, trust
from modicum.serve import load_run

KIND = "own_of_a_folder"
CONFIGURATION = """
from pathlib import Path
from transformers import Qwen3Config
from .own_helper import mark

mark()

class OwnConfig(Qwen3Config):
    model_type = "own_of_a_folder"
"""
MODEL = """
from transformers import Qwen3ForCausalLM
from .own_configuration import OwnConfig

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig

    def forward(self, *given, **more):
        found = super().forward(*given, **more)
        found.logits = 2 * found.logits
        return found
"""
AUTO_MAP = {
    "AutoConfig": "own_configuration.OwnConfig",
    "AutoModelForCausalLM": "own_model.OwnForCausalLM",
}


def own_folder(folder: Path, **changes: Any) -> Path:
    """A model whose type transformers does not have, with code that leaves a mark where it runs."""
    import transformers

    raw = config_json("qwen3")
    made = transformers.AutoConfig.for_model(**raw)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(made)
    folder.mkdir(parents=True)
    names = {"architectures": ["OwnForCausalLM"], "model_type": KIND, "auto_map": AUTO_MAP}
    (folder / "config.json").write_text(json.dumps(raw | names | changes))
    save_file({n: p.clone() for n, p in model.named_parameters()}, folder / "model.safetensors")
    (folder / "own_configuration.py").write_text(CONFIGURATION)
    (folder / "own_model.py").write_text(MODEL)
    marker = folder / "executed"
    (folder / "own_helper.py").write_text(
        f"from pathlib import Path\n\ndef mark():\n    Path({str(marker)!r}).touch()\n"
    )
    return folder


@pytest.fixture
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which no code of a folder has run, before the test and after it."""
    import transformers

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # transformers puts its copy there
    monkeypatch.setattr(trusted, "_running", {})
    yield
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]
    mapping = private.known_types()
    config = mapping._extra_content.pop(KIND, None)
    for table in (private.decoders(), private.classifiers()):
        table._extra_content.pop(config, None)
    kinds._architecture.cache_clear()


def test_without_the_flag_nothing_runs(tmp_path: Path, forgotten: None) -> None:
    folder = own_folder(tmp_path / "own")
    expected = (
        r"has no such model; the code in the model's own folder \(own_configuration\.py, "
        r"own_model\.py\) is run with model\.trust_remote_code: true alone"
    )
    for load in (huggingface.read_config, huggingface.load, load_run):
        with pytest.raises(InputError, match=expected):
            load(folder)
    recipe = modicum.Recipe(model={"path": str(folder)})
    with pytest.raises(InputError, match=expected):
        modicum.plan(recipe)
    assert not (folder / "executed").exists()


@torch.no_grad()
def test_with_the_flag_it_runs_and_says_so(tmp_path: Path, forgotten: None) -> None:
    folder = own_folder(tmp_path / "own")
    with pytest.warns(
        UserWarning, match=r"running the code.*own_configuration\.py.*own_helper\.py"
    ):
        trust(folder)
    assert (folder / "executed").exists()
    model = huggingface.load(folder)
    plain = own_folder(tmp_path / "plain", model_type="qwen3", architectures=None)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(model(ids), 2 * huggingface.load(plain)(ids))
    trust(folder)  # once in a process


@pytest.mark.expensive
def test_a_run_has_it_and_exports_it(tmp_path: Path, forgotten: None) -> None:
    text = "the cat sees a small tree and the dog likes it. " * 40
    folder = add_tokenizer(own_folder(tmp_path / "own"), text)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text[n:]}) + "\n" for n in range(50)))
    recipe = modicum.Recipe(
        model={"path": str(folder), "trust_remote_code": True},
        data={"path": str(data), "sequence_length": 32},
        training={"steps": 2, "batch_size": 2, "compile": "none"},
        samples={"count": 0},
    )
    with pytest.warns(UserWarning, match="running the code of a model's folder"):
        plan = modicum.plan(recipe)  # traced in a process of its own, which runs the code too
    assert plan.prediction.traced
    modicum.train(plan, tmp_path / "run")
    exported = tmp_path / "run" / "model"
    assert {file.name for file in exported.glob("*.py")} == {
        "own_configuration.py",
        "own_helper.py",
        "own_model.py",
    }
    assert type(load_run(tmp_path / "run").model).__name__ == "OwnForCausalLM"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoConfig": "own.Config"}}, "names no code for configuration and model"),
        ({"auto_map": {"AutoConfig": "a/b--own.C", "AutoModel": "own.M"}}, "this is elsewhere"),
        ({"auto_map": {"AutoConfig": "../own.C", "AutoModel": "own.M"}}, "this is elsewhere"),
        ({"auto_map": {"AutoConfig": "gone.C", "AutoModel": "gone.M"}}, "gone.py"),
        ({"model_type": "qwen3"}, "transformers itself has such a model"),
    ],
)
def test_what_cannot_be_trusted(
    changes: dict[str, Any], message: str, tmp_path: Path, forgotten: None
) -> None:
    folder = own_folder(tmp_path / "own", **changes)
    with pytest.raises(InputError, match=rf"trust_remote_code.*{message}"):
        trust(folder)
    assert not (folder / "executed").exists()


@pytest.mark.filterwarnings("ignore:model.trust_remote_code")
def test_code_that_fails_is_one_sentence(tmp_path: Path, forgotten: None) -> None:
    folder = own_folder(tmp_path / "own")
    (folder / "own_helper.py").write_text("def mark():\n    raise OSError('no\\nsuch')\n")
    with pytest.raises(InputError, match=r"folder fails \(OSError: no such\)"):
        trust(folder)


@pytest.mark.filterwarnings("ignore:model.trust_remote_code")
def test_other_code_for_the_same_type_is_refused(tmp_path: Path, forgotten: None) -> None:
    trust(own_folder(tmp_path / "own"))
    other = own_folder(tmp_path / "other")
    with pytest.raises(InputError, match="start another"):
        trust(other)
    assert not (other / "executed").exists()


def test_the_flag_is_for_a_folder() -> None:
    with pytest.raises(InputError, match=r"model\.trust_remote_code: is for the code"):
        modicum.Recipe(model={"trust_remote_code": True})
    assert named_files({}) == named_files({"auto_map": [3]}) == []


def test_where_the_disk_keeps_no_locks_code_is_copied_without_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("fcntl.flock", refuses)
    with trusted._turn():
        assert (tmp_path / "modicum" / "code" / "lock").exists()

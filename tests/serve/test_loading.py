"""What can be served together, and what cannot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.serve.conftest import Folders, ending_with, make_adapter, make_model

from modicum.core.errors import InputError
from modicum.core.weight_digests import weight_digests
from modicum.data.tokenizer import Tokenizer
from modicum.serve import load_adapted, load_run
from modicum.serve.asked import AskedText, parse
from modicum.serve.choices import token_requests
from modicum.serve.loading import load_served

IDS = torch.arange(9)[None]
# A linear form whose file says that it runs.
PLUGIN = """
from modicum.core.contracts.method import Info
from modicum.linears import LinearMethod

class Strange(LinearMethod):
    info = Info(name="strange", title="Strange", room="linears", paper="", claim="")

raise ImportError("it runs")
"""


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS)
    return found


def test_names_say_what_is_served(folders: Folders, tmp_path: Path) -> None:
    assert list(load_served(folders.model).names) == ["model"]
    for name, called in (("my-run", "my-run"), ("my  run\n2", "my-run-2")):
        run = tmp_path / name
        shutil.copytree(folders.model, run / "model")
        (run / "run.json").write_text("{}")
        assert list(load_served(run).names) == [called]
    assert list(load_served(folders.run).names) == ["adapter", "base"]
    more = load_served(folders.model, {"one": folders.run, "two": folders.peft})
    assert list(more.names) == ["base", "one", "two"]
    assert all(each.template is not None for each in more.names.values())
    assert len({each.adapter for each in more.names.values()}) == 3


def test_adapters_are_the_same_in_whatever_company(folders: Folders) -> None:
    served = load_served(folders.model, {"one": folders.run, "two": folders.other})
    for name, folder in (("one", folders.run), ("two", folders.other)):
        served.adapters[served.names[name].adapter or ""].activate(alone=True)
        assert torch.equal(logits(served.model), logits(load_run(folder).model))
    for adapter in served.adapters.values():
        adapter.deactivate()
    assert torch.equal(logits(served.model), logits(load_run(folders.model).model))


def test_a_merged_adapter_is_the_model(folders: Folders) -> None:
    served = load_served(folders.run, merge=True)
    assert (list(served.names), served.adapters) == (["merged"], {})
    assert served.names["merged"].adapter is None
    torch.testing.assert_close(logits(served.model), logits(load_run(folders.run).model))
    assert not torch.equal(logits(served.model), logits(load_run(folders.model).model))
    with pytest.raises(InputError, match="no adapter that could be merged"):
        load_served(folders.model, merge=True)
    with pytest.raises(InputError, match="serve them without it"):
        load_served(folders.run, {"one": folders.other}, merge=True)


@pytest.mark.parametrize("name", ["", "a b", "base", "adapter", "a\n"])
def test_a_name_is_one_of_its_own(folders: Folders, name: str) -> None:
    with pytest.raises(InputError, match="needs a name of its own") as caught:
        load_served(folders.run, {name: folders.other})
    assert caught.value.value == name


def test_an_adapter_of_another_base_is_refused(
    folders: Folders, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other", tokenizer, seed=5)
    theirs = make_adapter(tmp_path / "theirs", other, tokenizer, seed=1)
    with pytest.raises(InputError, match="trained on another base model"):
        load_served(folders.run, {"theirs": theirs})
    # Where the bytes are known they decide, wherever the base was.
    moved = shutil.copytree(folders.model, tmp_path / "moved")
    digests = theirs / "adapter" / "base_weights.json"
    digests.write_text(json.dumps(weight_digests(moved)))
    load_served(folders.run, {"theirs": theirs})
    digests.write_text(json.dumps(weight_digests(other)))
    with pytest.raises(InputError, match="trained on another base model"):
        load_served(folders.run, {"theirs": theirs})
    digests.write_text("[]")
    with pytest.raises(InputError, match="damaged"):
        load_served(folders.run, {"theirs": theirs})


def test_a_hub_s_name_of_the_base_is_the_user_s_word(folders: Folders, tmp_path: Path) -> None:
    peft = shutil.copytree(folders.peft, tmp_path / "peft")
    file = peft / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"base_model_name_or_path": "someone/some-model"}))
    assert "peft" in load_served(folders.model, {"peft": peft}).names


def test_another_tokenizer_or_form_is_refused(
    folders: Folders, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = shutil.copytree(folders.other, tmp_path / "other")
    Tokenizer.train(iter(["other words"] * 9), vocabulary_size=270).save(other / "tokenizer")
    with pytest.raises(InputError, match="another tokenizer"):
        load_served(folders.run, {"other": other})
    tokenizer.save(other / "tokenizer")
    recipe = (
        f"model: {{path: {folders.model}}}\ndata: {{path: {tmp_path}}}\n"
        "adapter: {method: lora, rank: 2}\n"
    )
    (other / "recipe.yaml").write_text(recipe)
    load_served(folders.run, {"other": other})
    (other / "recipe.yaml").write_text(recipe + "linear: {method: nf4}\n")
    with pytest.raises(InputError, match="in another form"):
        load_served(folders.run, {"other": other})
    with pytest.raises(InputError, match="no such folder of an adapter"):
        load_served(folders.run, {"none": tmp_path / "none"})


def test_an_adapter_without_conversations_continues_text(folders: Folders, tmp_path: Path) -> None:
    plain = shutil.copytree(folders.other, tmp_path / "plain")
    (plain / "run.json").write_text(json.dumps({"data": {"conversations": False}}))
    names = load_served(folders.run, {"plain": plain}).names
    assert names["plain"].template is None
    assert names["base"].template is not None
    assert load_served(plain).names["base"].template is None


def test_the_model_s_files_say_which_tokens_end_a_text(folders: Folders, tmp_path: Path) -> None:
    model = shutil.copytree(folders.model, tmp_path / "model")
    own = load_served(model)
    assert own.ends == {own.tokenizer.eos_id}
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_served(model).ends == {7, 9, own.tokenizer.eos_id}
    assert load_run(model).ends == {7, 9, own.tokenizer.eos_id}


def test_an_adapter_s_own_end_of_text_ends_what_it_writes(folders: Folders, tmp_path: Path) -> None:
    other, end = ending_with("<|im_start|>", folders.other, tmp_path / "other")
    served = load_served(folders.run, {"other": other, "peft": folders.peft})
    assert end not in served.ends
    own = {"adapter": set(), "base": set(), "other": {end}, "peft": set()}
    assert {name: each.ends for name, each in served.names.items()} == own
    for name, ends in own.items():
        body = json.dumps({"model": name, "prompt": "to be"}).encode()
        (request,) = token_requests(served, parse(body, AskedText), 9)
        assert request.ends == served.ends | ends


def test_a_plugin_of_a_run_is_run_where_that_was_said_alone(
    folders: Folders, tmp_path: Path
) -> None:
    run, plugin = shutil.copytree(folders.run, tmp_path / "run"), tmp_path / "own.py"
    plugin.write_text(PLUGIN)
    (run / "recipe.yaml").write_text(
        f"model: {{path: {folders.model}}}\ndata: {{path: {tmp_path}}}\n"
        f"adapter: {{method: lora, rank: 2}}\nlinear: {{method: strange}}\nplugins: [{plugin}]\n"
    )
    refused = r"recipe\.yaml: linear\.method: this is a plugin's, .*own\.py"
    every: tuple[Callable[..., Any], ...] = (load_run, load_adapted, load_served)
    for loads in every:
        with pytest.raises(InputError, match=refused):
            loads(run)
    with pytest.raises(InputError, match=refused):
        load_served(folders.run, {"strange": run})
    with pytest.raises(ImportError, match="it runs"):
        load_run(run, trust_remote_code=True)
    asked = shutil.copytree(folders.run, tmp_path / "asked")
    (asked / "recipe.yaml").write_text(
        f"model: {{path: {folders.model}}}\ndata: {{path: {tmp_path}}}\n"
        f"adapter: {{method: lora, rank: 2}}\nplugins: [{plugin}]\n"
    )
    with pytest.raises(ImportError, match="it runs"):
        load_served(asked, {"strange": run}, trust_remote_code=True)


def test_a_base_may_still_name_code_of_a_model_that_transformers_has(
    folders: Folders, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    base = shutil.copytree(folders.model, tmp_path / "base")
    config = base / "config.json"
    old = {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | old))
    (base / "own.py").touch()
    run, plugin = make_adapter(tmp_path / "run", base, tokenizer, seed=1), tmp_path / "own.py"
    with pytest.raises(InputError, match="transformers itself has such a model"):
        load_run(run, trust_remote_code=True)
    plugin.write_text(PLUGIN)
    (run / "recipe.yaml").write_text(
        f"model: {{path: {base}}}\ndata: {{path: {tmp_path}}}\n"
        f"adapter: {{method: lora, rank: 2}}\nlinear: {{method: strange}}\nplugins: [{plugin}]\n"
    )
    with pytest.raises(ImportError, match="it runs"):
        load_run(run, trust_remote_code=True)


def test_files_that_hold_something_else_are_named(folders: Folders, tmp_path: Path) -> None:
    model = shutil.copytree(folders.model, tmp_path / "model")
    run = shutil.copytree(folders.run, tmp_path / "run")
    (model / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config\.json: this holds no JSON object"):
        load_run(model)
    (run / "run.json").write_text("[]")
    with pytest.raises(InputError, match=r"run\.json: this holds no JSON object"):
        load_run(run)
    (run / "adapter" / "base_weights.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"base_weights\.json: is damaged"):
        load_run(run)

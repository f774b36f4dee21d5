"""A value that an option does not take is one message of modicum's own, whichever option it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from modicum.cli.app import COMMANDS, GROUPS

Words = tuple[str, ...]


def wrong_values() -> Iterator[tuple[Words, str]]:
    """Every option of every command that does not take any text, with a word that it refuses."""
    commands = {(command.__name__.rstrip("_"),): command for command in COMMANDS}
    for group in GROUPS:
        for one in group.registered_commands:
            name = one.name or one.callback.__name__.replace("_", "-")
            commands[str(group.info.name), name] = one.callback
    for words, command in commands.items():
        for name, hint in get_type_hints(command, include_extras=True).items():
            if get_origin(hint) is None or not hasattr(hint, "__metadata__"):
                continue
            kind, [option] = hint.__origin__, hint.__metadata__
            if not type(option).__name__.startswith("Option") or kind is bool:
                continue
            spelt = next((each for each in option.param_decls or () if each.startswith("--")), None)
            kinds = {kind, *get_args(kind)}
            if {int, float} & kinds or any(get_origin(each) is Literal for each in kinds):
                yield words, (spelt or f"--{name.rstrip('_').replace('_', '-')}")


OPTIONS = list(wrong_values())


def test_there_are_such_options() -> None:
    assert {
        (("export",), "--dtype"),
        (("serve",), "--port"),
        (("verify", "resume"), "--steps"),
    } <= (set(OPTIONS))
    assert len(OPTIONS) > 20


@pytest.mark.parametrize(
    ("words", "option"), OPTIONS, ids=[f"{' '.join(w)} {o}" for w, o in OPTIONS]
)
def test_a_wrong_value_is_one_message(modicum: Any, words: Words, option: str) -> None:
    ended = modicum(*words, "somewhere", option, "q4_k")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
    assert ended.err.startswith(f"modicum: {option}: "), ended.err
    assert "'q4_k'" in ended.err
    for strange in ("Value error", "nput should", "pydantic"):
        assert strange not in ended.err


def test_it_says_what_is_allowed_and_what_makes_other_types(modicum: Any) -> None:
    said = modicum("export", "run", "--dtype", "q4_k").err
    assert said.startswith("modicum: --dtype: no such choice (found: 'q4_k'); allowed: f32, f16,")
    assert (
        "llama-quantize of llama.cpp makes others, such as q4_k, of a file in f32 or bf16" in said
    )
    assert "Did you mean 'gguf'?" in modicum("export", "run", "--form", "ggfu").err
    assert "too large (found: '70000'); allowed: at most 65535 (the port" in (
        modicum("serve", "run", "--port", "70000").err
    )
    assert "--rows: expected an integer (found: 'few')\n" in (
        modicum("data", "recipe.yaml", "--rows", "few").err
    )


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (("train", "demo-adapt", "--memory", "8GB"), "--set budget.memory=VALUE"),
        (("plan", "demo-adapt", "--batch-size=4"), "--set training.batch_size=VALUE"),
        (("train", "demo-adapt", "--data", "rows.jsonl"), "--set data.path=VALUE"),
        (("verify", "data", "r.yaml", "--seed", "3"), "--set training.seed=VALUE"),
    ],
)
def test_an_option_that_is_a_field_of_the_recipe_names_it(
    modicum: Any, words: Words, fields: str
) -> None:
    ended = modicum(*words)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
    assert fields in ended.err


def test_any_other_unknown_option_has_the_usage(modicum: Any) -> None:
    for words in (("train", "demo-adapt", "--colour", "red"), ("chat", "run", "--memory", "8GB")):
        ended = modicum(*words)
        assert ended.code == 2
        assert "No such option" in ended.err
        assert "--set" not in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("verify", "reproduce", "runs/x"), "`modicum verify` has no such command; `modicum repro"),
        (("machine",), "`modicum` has no such command; `modicum bench machine` is one"),
    ],
)
def test_a_command_at_another_place_is_named(modicum: Any, words: Words, said: str) -> None:
    ended = modicum(*words)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
    assert said in ended.err


def test_a_command_that_is_nowhere_has_the_usage(modicum: Any) -> None:
    assert "No such command 'trian'" in modicum("verify", "trian").err

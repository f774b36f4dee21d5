from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.recipe import Recipe, methods_for
from modicum.recipe.paths import anchored
from modicum.recipe_yaml import dump, load, locate, parse, places, shipped, written

ADAPTERS = ", ".join(sorted(methods_for("adapter")))


@pytest.fixture
def recipe_file(tmp_path) -> Path:
    file = tmp_path / "r.yaml"
    file.write_text(
        "model:\n  path: base  # a comment\n"
        "adapter: {method: lora, rank: 4}\n"
        "training:\n  steps: 7\n  learning_rate: 2e-3\n"
        "budget:\n  memory: 1.5GB\n"
    )
    return file


def test_yaml_and_python_say_the_same(recipe_file):
    assert load(recipe_file) == Recipe(
        model={"path": "base"},
        adapter={"method": "lora", "rank": 4},
        training={"steps": 7, "learning_rate": 2e-3},
        budget={"memory": 1_500_000_000},
    )


def test_an_empty_recipe_is_all_defaults(tmp_path):
    (tmp_path / "r.yaml").write_text("# nothing\n")
    assert load(tmp_path / "r.yaml") == Recipe()


def test_what_is_written_reads_back(recipe_file, tmp_path):
    odd = Recipe(samples={"prompts": ["é: #\n", "no", "1", "\x85\u2028 \u2029", "\ufeff"]})
    for recipe in (load(recipe_file), Recipe(), odd):
        (tmp_path / "again.yaml").write_text(dump(recipe), encoding="utf-8")
        assert load(tmp_path / "again.yaml") == recipe


LOOK_LIKE = ["yes", "1e3", "0E0", "0x1f", "010", "1:30", "2020-01-01", "null", "~", "<<", "="]
LOOK_LIKE += ["1_0", ".5", "-.inf", "+", "*a", "&a", "!a", "%a", "@a", "?", "-", "#"]
words = st.text() | st.sampled_from(LOOK_LIKE)


@given(st.lists(words, max_size=4), st.floats(0, allow_infinity=False, exclude_min=True), words)
@settings(max_examples=100)
def test_all_words_and_numbers_survive_writing(prompts, rate, column):
    recipe = Recipe(
        samples={"prompts": prompts}, training={"learning_rate": rate}, data={"column": column}
    )
    assert Recipe(**parse(dump(recipe), "x")[0]) == recipe


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("5E2", 500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-3", -3),
        ("+3", 3),
        ("0", 0),
        (".inf", math.inf),
        ("yes", "yes"),
        ("off", "off"),
        ("True", True),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("010", 10.0),
        ("2020-01-01", "2020-01-01"),
        ("~", None),
        ("", None),
        ("'5'", "5"),
    ],
)
def test_words_and_numbers(text, value):
    got = parse(f"x: {text}", "x")[0]["x"]
    assert got == value
    assert type(got) is type(value)


def test_every_field_knows_its_line():
    lines = parse("a:\n  b: 1\n\n  c:\n  - x\n  - d: 2\n", "x")[1]
    assert lines == {"a": 1, "a.b": 2, "a.c": 4, "a.c.0": 5, "a.c.1": 6, "a.c.1.d": 6}


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("training.steps=10", {"training__steps": 10}),
        (" training.steps = 10", {"training__steps": 10}),
        ("budget.memory=2GiB", {"budget__memory": 2**31}),
        ("data.include=[a, b]", {"data__include": ["a", "b"]}),
        ("training.clip_norm=null", {"training__clip_norm": None}),
        ("adapter=null", {"adapter": None}),
        ("adapter.rank=9", {"adapter__rank": 9}),
        ("data.path=a=b", {"data__path": "a=b"}),
        ("data.column='3'", {"data__column": "3"}),
        ("training={steps: 3}", {"training": {"steps": 3}}),
    ],
)
def test_overrides(recipe_file, override, change):
    assert load(recipe_file, [override]) == load(recipe_file).changed(**change)


def test_the_last_override_holds(recipe_file):
    assert load(recipe_file, ["training.steps=3", "training.steps=4"]).training.steps == 4
    again = ["adapter.rank=8", "adapter={method: lora, rank: 2}", "adapter.rank=4"]
    assert load(recipe_file, again) == load(recipe_file)
    assert written(recipe_file, again, "adapter.rank") == "--set adapter.rank=4"


def test_an_override_of_a_section_is_where_its_fields_are_written(recipe_file):
    section, own = "adapter={method: lora, rank: 2}", "adapter.rank=8"
    assert written(recipe_file, [], "adapter.rank") == f"{recipe_file}:3"
    assert written(recipe_file, ["training.seed=3"], "training.steps") == f"{recipe_file}:5"
    assert written(recipe_file, [own], "adapter.rank") == f"--set {own}"
    assert written(recipe_file, [section], "adapter.rank") == f"--set {section}"
    assert written(recipe_file, [section], "adapter.alpha") is None
    # The last one counts; and of a section that is another, the file says nothing.
    assert written(recipe_file, [section, own], "adapter.rank") == f"--set {own}"
    assert written(recipe_file, [own, section], "adapter.rank") == f"--set {section}"
    assert written(recipe_file, ["adapter={method: lora}"], "adapter.rank") is None
    assert written(recipe_file, ["adapter=null"], "adapter") == "--set adapter=null"


def test_an_override_of_the_length_or_the_warm_up_replaces_the_files(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("training:\n  steps: 7\n  warmup_steps: 3\n")
    tokens = load(file, ["training.tokens=200k"]).training
    assert (tokens.steps, tokens.epochs, tokens.tokens) == (None, None, 200_000)
    assert tokens.warmup_steps == 3
    again = load(file, ["training.epochs=2", "training.warmup_fraction=0.1"]).training
    assert (again.steps, again.epochs) == (None, 2)
    assert (again.warmup_steps, again.warmup_fraction) == (0, 0.1)
    assert written(file, ["training.epochs=2"], "training.steps") is None
    assert written(file, ["training.epochs=2"], "training.warmup_steps") == f"{file}:3"
    assert load(file, ["training.warmup_fraction=0"]).training.warmup_steps == 3
    with pytest.raises(InputError, match="the length of the run is given more than once"):
        load(file, ["training.epochs=2", "training.tokens=3k"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.steps", "--set: expected FIELD=VALUE (found: 'training.steps')"),
        ("=3", "--set: expected FIELD=VALUE (found: '=3')"),
        (
            "training.steps=0",
            "--set training.steps=0: training.steps: too small (found: 0); allowed: at least 1",
        ),
        (
            "trainig.steps=3",
            "--set trainig.steps=3: trainig: unknown key; allowed: "
            f"{', '.join(sorted(Recipe.model_fields))}. Did you mean 'training'?",
        ),
        (
            "training.steps.x=3",
            "--set training.steps.x=3: training.steps: is a value, not a section",
        ),
        (
            "training.steps=[",
            "--set training.steps=[:1: not valid YAML: expected the node content, but found "
            "'<stream end>'",
        ),
        (
            "adapter.method=lorra",
            "--set adapter.method=lorra: adapter.method: unknown method in the room 'adapters' "
            f"(found: 'lorra'); allowed: {ADAPTERS}. Did you mean 'lora'?",
        ),
    ],
)
def test_mistakes_in_overrides_name_the_override(recipe_file, override, message):
    with pytest.raises(InputError) as caught:
        load(recipe_file, [override])
    assert str(caught.value) == message


def test_recipes_ship_and_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = shipped()
    assert {"demo-adapt", "demo-pretrain"} <= known.keys()
    for name, file in known.items():
        assert locate(name) == file
        load(name)
    (tmp_path / "demo-adapt").write_text("training:\n  steps: 1\n")
    assert locate("demo-adapt") == Path("demo-adapt")  # a file goes before a name
    with pytest.raises(
        InputError, match=r"no such recipe.*'demo-adpt'.*Did you mean 'demo-adapt'\?"
    ):
        locate("demo-adpt")
    Path("my-recipe.yaml").write_text("training: {}\n")
    Path("my-recipes.yaml").write_text("- id: no recipe\n")
    os.mkfifo("pipe.yaml")  # which nobody writes to
    for name in ("my-recipe.yml", "my-recipe", str(tmp_path / "my-recip.yaml")):
        there = Path(name).with_name("my-recipe.yaml")
        with pytest.raises(InputError, match=rf"Did you mean '{there}'\?"):
            locate(name)
    with pytest.raises(InputError) as caught:
        locate(tmp_path / "other")
    assert "Did you mean" not in str(caught.value)
    shown = r"a recipe is a file, and this is a folder; give a recipe of it: .*my-recipe\.yaml"
    with pytest.raises(InputError, match=shown):
        locate(tmp_path)
    (tmp_path / "run").mkdir()
    with pytest.raises(InputError, match=r"this is a folder$"):
        locate("run")
    (tmp_path / "run" / "recipe.yaml").write_text("training: {}\n")
    with pytest.raises(InputError, match=r"this one's is run/recipe\.yaml"):
        locate("run")


@pytest.mark.parametrize("name", sorted(shipped()))
def test_a_shipped_recipe_says_what_makes_the_files_that_it_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = locate(name).read_text()
    found = re.findall(r"^  (?:validation_)?path: (?!package:)(\S+)(.*)$", text, re.MULTILINE)
    commands = [re.fullmatch(r" # made by: (modicum .+)", rest) for _, rest in found]
    assert all(commands), "a path that the newcomer lacks, without the command that makes it"
    for field in ("data.path", "data.validation_path", "model.path"):
        section, key = field.split(".")
        path = getattr(getattr(load(name), section), key)
        if path is None or path.startswith("package:"):
            continue
        with pytest.raises(InputError) as caught, places(name):
            raise InputError("there is no such file; look again", field=field, value=path)
        [command] = {each[1] for each in commands if each is not None}
        assert f"{field}: there is no such file; `{command}` makes it" in str(caught.value)
        Path(path).mkdir(parents=True)  # what is there is wrong for another reason
        with pytest.raises(InputError, match="look again"), places(name):
            raise InputError("wrong; look again", field=field, value=path)
        with pytest.raises(InputError, match="look again"), places(name, [f"{field}=elsewhere"]):
            raise InputError("not there; look again", field=field, value="elsewhere")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"a: \xff")
    with pytest.raises(InputError, match=r"r.yaml: not UTF-8 text \(byte 3\)"):
        load(tmp_path / "r.yaml")


# Nine lines of ten aliases each stand for ten to the ninth values.
BOMB = "a: &a [x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BOMB, "expands to more than 100000 values"),
        ("a: " + "[" * 100_000, "nested too deeply"),
        ("a: &a [*a]\n", "nested too deeply, or within itself"),
        ("x" * (1 << 18) + "y", "more than 256 KiB"),
        ("training: {steps: " + "9" * 5000 + "}\n", "cannot be read as !!int"),
        ("? " + "x" * 2000 + "\n: [1, 2]\n", "has more than 1000 characters"),
        ("a: !!binary eHh4\n", "the tag tag:yaml.org,2002:binary means nothing here"),
    ],
    ids=["aliases", "depth", "itself", "size", "digits", "key", "binary"],
)
def test_a_text_that_means_no_recipe_is_refused_at_once_and_briefly(tmp_path, text, told):
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=told) as raised:
        load(file)
    assert len(str(raised.value)) < 1000


def test_a_key_that_is_no_name_is_an_unknown_key(tmp_path):
    (tmp_path / "r.yaml").write_text("mo-del: {layers: 1}\n")
    with pytest.raises(InputError, match="mo-del: unknown key"):
        load(tmp_path / "r.yaml")
    (tmp_path / "r.yaml").write_text("training: {ste-ps: 1}\n")
    with pytest.raises(InputError, match=r"r\.yaml:1: training\.ste-ps: unknown key"):
        load(tmp_path / "r.yaml")


def test_a_path_that_links_to_itself_is_for_its_reader_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    values = {"data": {"path": "loop"}, "model": {"path": "~nobody-of-this-name/model"}}
    named = anchored(values, tmp_path)
    assert named["data"]["path"] == str(tmp_path / "loop")
    assert named["model"]["path"] == str(tmp_path / "~nobody-of-this-name/model")

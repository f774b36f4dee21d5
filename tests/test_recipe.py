"""Every mistake in a recipe gets one message that says where, what, and what instead."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import modicum
from modicum.core.contracts.catalog import MethodRecord
from modicum.core.errors import InputError
from modicum.recipe import SLOTS, Recipe, assign, differences, methods_for
from modicum.recipe.json_schema import json_schema

PLUGIN = """
from modicum.core.contracts.method import Info, Method
class Greedy(Method):
    info = Info(name="greedy", title="Greedy", room="adapters", paper="", claim="",
                traits=("frees_gradient_in_backward",))
"""
GREEDY = "plugins: [greedy.py]\nadapter:\n  method: greedy\n"
SIZE = "write a number and a unit: 8GB (10^9 bytes), 8GiB (2^30 bytes), 512MB, 750MiB"
EVERY = "write a number of steps, or a number and a unit: 30s, 10m, 2h, 1d"
COUNT = "write a number, and a letter for many: 500_000, 500k, 2M (10^6), 1.5B (10^9), 1T (10^12)"
SECTIONS = ", ".join(sorted(Recipe.model_fields))
DATA = ", ".join(sorted(type(Recipe().data).model_fields))
ADAPTERS = ", ".join(sorted(methods_for("adapter")))
LORA = "model:\n  path: base\nadapter:\n  method: lora\n"
BY_STEP = (
    "not one of the known forms (found: {}); allowed: an integer of at least 1, or "
    "[first, last, updates], each at least 1"
)
# The recipe's text, and the whole message after the file's name.
MISTAKES = [
    # unknown keys
    (
        "budgt:\n  memory: 1GB\n",
        f":1: budgt: unknown key; allowed: {SECTIONS}. Did you mean 'budget'?",
    ),
    (
        "# \n\ndata:\n  path: x\n  colum: y\n",
        f":5: data.colum: unknown key; allowed: {DATA}. Did you mean 'column'?",
    ),
    (
        LORA + "  rnak: 3\n",
        ":5: adapter.rnak: unknown key; allowed: alpha, also, dropout, exclude, rank, "
        "rank_stabilized, targets. Did you mean 'rank'?",
    ),
    # known, and at another place
    ("steps: 3\n", f":1: steps: unknown key; allowed: {SECTIONS}. Did you mean 'training.steps'?"),
    (
        "data:\n  training: {}\n",
        f":2: data.training: unknown key; allowed: {DATA}. Did you mean 'training'?",
    ),
    ("null: 3\n", f":1: null: unknown key; allowed: {SECTIONS}"),
    # wrong types
    ("training:\n  steps: ten\n", ":2: training.steps: expected an integer (found: 'ten')"),
    ("training:\n  steps: 1.5\n", ":2: training.steps: expected an integer (found: 1.5)"),
    ("training:\n  steps: 1e3\n", ":2: training.steps: expected an integer (found: 1000.0)"),
    ("training:\n  steps: 1_0\n", ":2: training.steps: expected an integer (found: '1_0')"),
    ("training:\n  steps: true\n", ":2: training.steps: expected an integer (found: True)"),
    (
        "training:\n  steps:\n",
        ":2: training.steps: says nothing of how long to train (found: None); "
        "allowed: a number of updates, or training.epochs or training.tokens instead",
    ),
    (
        "training:\n  steps: 3\n  epochs: 2\n",
        ":3: training.epochs: the length of the run is given more than once; keep one of "
        "training.steps, training.epochs and training.tokens, and set the others to null "
        "(found: 2.0)",
    ),
    (
        "training:\n  steps: null\n  epochs: 2\n  tokens: 2M\n",
        ":4: training.tokens: the length of the run is given more than once; keep one of "
        "training.steps, training.epochs and training.tokens, and set the others to null "
        "(found: 2000000)",
    ),
    ("training:\n  tokens: 1e6\n", f":2: training.tokens: not a count; {COUNT} (found: 1000000.0)"),
    (
        "training:\n  tokens: 1.5\n",
        f":2: training.tokens: not a count; {COUNT} (found: 1.5)",
    ),
    (
        "training:\n  warmup_steps: 3\n  warmup_fraction: 0.1\n",
        ":3: training.warmup_fraction: the warm-up is given more than once; keep one of "
        "training.warmup_steps, training.warmup_fraction and training.warmup_tokens, and set the "
        "others to 0 or null (found: 0.1)",
    ),
    (
        "training:\n  warmup_fraction: 1.0\n",
        ":2: training.warmup_fraction: too large (found: 1.0); allowed: below 1.0",
    ),
    (
        "training:\n  decay_fraction: 0.1\n",
        ":2: training.decay_fraction: is for the schedule flat, and training.schedule is cosine; "
        "set that to flat, or this to null (found: 0.1)",
    ),
    ("training:\n  epochs: 0\n", ":2: training.epochs: too small (found: 0); allowed: above 0.0"),
    (
        "training:\n  learning_rate: fast\n",
        ":2: training.learning_rate: expected a number (found: 'fast')",
    ),
    ("training: 5\n", ":1: training: expected a section with keys (found: 5)"),
    ("training: [a]\n", ":1: training: expected a section with keys (found: ['a'])"),
    (
        "adapter: lora\n",
        ":1: adapter: expected a section with keys (found: 'lora'); allowed: adapter: "
        "{method: lora}",
    ),
    (
        "model: my/model\n",
        ":1: model: expected a section with keys (found: 'my/model'); allowed: model: "
        "{path: my/model}",
    ),
    ("comm: 3\n", ":1: comm: expected a section with keys (found: 3)"),
    ("data:\n  boundaries: yes\n", ":2: data.boundaries: expected true or false (found: 'yes')"),
    ("data:\n  include: '*.py'\n", ":2: data.include: expected a list (found: '*.py')"),
    ("data:\n  include:\n  - a\n  - 3\n", ":4: data.include.1: expected text (found: 3)"),
    ("data:\n  path: 3\n", ":2: data.path: expected text (found: 3)"),
    ("optimizer:\n  betas: 0.9\n", ":2: optimizer.betas: expected a list (found: 0.9)"),
    ("optimizer:\n  betas: [0.9]\n", ":2: optimizer.betas.1: this field is needed"),
    (LORA + "  rank: eight\n", ":5: adapter.rank: expected an integer (found: 'eight')"),
    ("comm:\n  method: acp_sgd\n  rank: [2, 4]\n", f":3: comm.rank: {BY_STEP.format('[2, 4]')}"),
    (
        "comm:\n  method: acp_sgd\n  rank: [2, 4, 0]\n",
        f":3: comm.rank: {BY_STEP.format('[2, 4, 0]')}",
    ),
    ("comm:\n  method: acp_sgd\n  rank: x\n", ":3: comm.rank: expected an integer (found: 'x')"),
    (LORA + "  exclude: q_proj\n", ":5: adapter.exclude: expected a list (found: 'q_proj')"),
    # units
    ("budget:\n  memory: 8 gigs\n", f":2: budget.memory: not a size; {SIZE} (found: '8 gigs')"),
    ("budget:\n  memory: 1.5\n", f":2: budget.memory: not a size; {SIZE} (found: 1.5)"),
    ("data:\n  limit: GB\n", f":2: data.limit: not a size; {SIZE} (found: 'GB')"),
    ("checkpoint:\n  every: soon\n", f":2: checkpoint.every: {EVERY} (found: 'soon')"),
    ("evaluation:\n  every: 10 min\n", f":2: evaluation.every: {EVERY} (found: '10 min')"),
    # negative or zero sizes, numbers out of bounds
    ("budget:\n  memory: 0\n", f":2: budget.memory: a size must be above zero; {SIZE} (found: 0)"),
    (
        "budget:\n  memory: -8GB\n",
        f":2: budget.memory: a size must be above zero; {SIZE} (found: '-8GB')",
    ),
    (
        "checkpoint:\n  every: 0\n",
        ":2: checkpoint.every: the number of steps must be at least 1 (found: 0)",
    ),
    ("training:\n  steps: 0\n", ":2: training.steps: too small (found: 0); allowed: at least 1"),
    (
        "training:\n  batch_size: -1\n",
        ":2: training.batch_size: too small (found: -1); allowed: at least 1",
    ),
    (
        "training:\n  micro_batch_size: 0\n",
        ":2: training.micro_batch_size: too small (found: 0); allowed: at least 1",
    ),
    (
        "training:\n  learning_rate: -1e-3\n",
        ":2: training.learning_rate: too small (found: -0.001); allowed: above 0.0",
    ),
    (
        "training:\n  learning_rate: .nan\n",
        ":2: training.learning_rate: must be a finite number (found: nan)",
    ),
    (
        "optimizer:\n  betas: [0.9, 1.0]\n",
        ":2: optimizer.betas.1: too large (found: 1.0); allowed: below 1.0",
    ),
    (
        "model:\n  vocabulary_size: 3\n",
        ":2: model.vocabulary_size: too small (found: 3); allowed: at least 257",
    ),
    (LORA + "  rank: 0\n", ":5: adapter.rank: too small (found: 0); allowed: at least 1"),
    (LORA + "  targets: []\n", ":5: adapter.targets: the list is too short (found: [])"),
    # words
    (
        "training:\n  precision: fp16\n",
        ":2: training.precision: not one of the known words (found: 'fp16'); "
        "allowed: 'auto', 'fp32' or 'bf16'. Did you mean 'bf16'?",
    ),
    (
        "training:\n  micro_batch_size: atuo\n",
        ":2: training.micro_batch_size: not one of the known words (found: 'atuo'); "
        "allowed: 'auto'. Did you mean 'auto'?",
    ),
    (
        "model:\n  mixer: atention\n",
        ":2: model.mixer: not one of the known words (found: 'atention'); "
        "allowed: 'attention'. Did you mean 'attention'?",
    ),
    # methods
    (
        "adapter:\n  rank: 3\n  method: lorra\n",
        ":3: adapter.method: unknown method in the room 'adapters' (found: 'lorra'); "
        f"allowed: {ADAPTERS}. Did you mean 'lora'?",
    ),
    ("\nadapter:\n  rank: 3\n", f":2: adapter.method: names no method; allowed: {ADAPTERS}"),
    (
        "adapter:\n  method: 3\n",
        f":2: adapter.method: expected a method's name; allowed: {ADAPTERS}",
    ),
    ("plugins:\n- mine.py\n", ":2: plugins.0: there is no such file of methods (found: 'mine.py')"),
    # methods that do not combine
    (
        "adapter:\n  method: lora\n",
        ":2: adapter.method: lora does not combine with the rest of the recipe: an adapter adapts "
        "trained weights, and this model starts from random ones; give model.path a trained "
        "model, or leave the adapter out",
    ),
    (
        GREEDY,
        ":3: adapter.method: greedy does not combine with the rest of the recipe: gradients are "
        "used up during the backward pass, so their norm is never known; set training.clip_norm "
        "to null",
    ),
    # fields that contradict each other
    (
        "training:\n  batch_size: 4\n  micro_batch_size: 8\n",
        ":3: training.micro_batch_size: larger than training.batch_size (4) (found: 8)",
    ),
    (
        "model:\n  path: base\n  layers: 3\n",
        ":3: model.layers: the model in model.path decides this; leave it out",
    ),
    (
        "model:\n  width: 250\n",
        ":2: model.width: must be a multiple of model.heads (4) (found: 250)",
    ),
    ("model:\n  heads: 7\n", ":2: model.heads: must divide model.width (256) (found: 7)"),
    (
        "model:\n  width: 12\n",
        ":2: model.width: width / heads must be even, for rotary positions (found: 12)",
    ),
    ("model:\n  kv_heads: 3\n", ":2: model.kv_heads: must divide model.heads (4) (found: 3)"),
    (
        "model:\n  context: 9\n",
        ":2: model.context: shorter than data.sequence_length (256) (found: 9)",
    ),
    (
        "data:\n  sequence_length: 99\nmodel:\n  context: 9\n",
        ":2: data.sequence_length: longer than the model's context (9) (found: 99)",
    ),
    # text that is no recipe
    ("training:\n  steps: 1\n  steps: 2\n", ":3: training.steps: this key stands here twice"),
    (
        "training:\n\tsteps: 1\n",
        ":2: not valid YAML: found character '\\t' that cannot start any token",
    ),
    ("data:\n  include: [a\n", ":3: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    ("- training\n", ":1: a recipe is a list of sections (`training:` ...)"),
    ("training:\n  steps: !!int x\n", ":2: training.steps: cannot be read as !!int (found: 'x')"),
    (
        "a: !!python/object/apply:os.system [x]\n",
        ":1: the tag tag:yaml.org,2002:python/object/apply:os.system means nothing here",
    ),
    (
        "a: !!python/name:os.system x\n",
        ":1: the tag tag:yaml.org,2002:python/name:os.system means nothing here",
    ),
    ("a: &x [*x]\n", ": nested too deeply, or within itself"),
    ("a: b\nc: \x00\n", ":2: a character that no text has (U+0000)"),
    ("? [a]\n: b\n", ":1: a key must be a word"),
]
READ = """
import json, sys
from modicum import recipe_yaml
from modicum.core.errors import InputError
told = []
for text in json.load(sys.stdin):
    open("r.yaml", "w").write(text)
    try:
        told.append(repr(recipe_yaml.load("r.yaml")))
    except InputError as error:
        told.append(str(error))
assert "torch" not in sys.modules, "torch was imported"
json.dump(told, sys.stdout)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, str]:
    """What a process of its own says of each text, without importing torch."""
    folder, texts = tmp_path_factory.mktemp("mistakes"), [text for text, _ in MISTAKES]
    (folder / "greedy.py").write_text(PLUGIN)
    done = subprocess.run(
        [sys.executable, "-c", READ],
        cwd=folder,
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    return dict(zip(texts, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_each_mistake_gets_its_message(told, text, message):
    assert told[text] == f"r.yaml{message}"


def test_python_reports_the_same_mistakes_without_a_line():
    with pytest.raises(InputError) as caught:
        Recipe(training={"stpes": 3})
    assert str(caught.value).startswith("training.stpes: unknown key; allowed: batch_size, ")
    assert caught.value.suggestion == "steps"
    assert caught.value.exit_code == 2
    with pytest.raises(InputError, match=r"^training.steps: too small \(found: 0\)"):
        Recipe().changed(training__steps=0)


def test_recipes_are_frozen_and_equal_by_value():
    recipe = Recipe(training={"steps": 3})
    with pytest.raises(ValueError, match="frozen"):
        recipe.training.steps = 4
    assert recipe == Recipe().changed(training__steps=3) != Recipe()


def test_a_method_is_spelled_as_a_value_or_as_keys():
    from modicum.adapters import LoRA

    value = Recipe(model={"path": "x"}, adapter=LoRA(rank=3, exclude=("q_proj",)))
    keys = Recipe(model={"path": "x"}, adapter={"method": "lora", "rank": 3, "exclude": ["q_proj"]})
    assert value == keys
    assert value.method("adapter") == LoRA(rank=3, exclude=("q_proj",))
    assert Recipe().method("adapter") is None


def test_a_methods_own_mistakes_are_found_without_loading_it(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("raise RuntimeError\n" + PLUGIN)
    with pytest.raises(InputError, match=r"adapter\.x: unknown key"):
        Recipe(
            plugins=[str(file)], adapter={"method": "greedy", "x": 1}, training={"clip_norm": None}
        )


recipes = st.fixed_dictionaries(
    {},
    optional={
        "model": st.one_of(
            st.fixed_dictionaries({"path": st.text(min_size=1)}),
            st.fixed_dictionaries(
                {"width": st.sampled_from([64, 128]), "heads": st.sampled_from([1, 2, 4])},
                optional={"kv_heads": st.sampled_from([1, None]), "tied_embeddings": st.booleans()},
            ),
        ),
        "data": st.fixed_dictionaries(
            {},
            optional={
                "path": st.one_of(st.none(), st.text()),
                "include": st.lists(st.text(), max_size=2),
                "limit": st.sampled_from([None, 5, "3MB", "1.5 GiB"]),
                "validation_fraction": st.floats(0, 0.99),
            },
        ),
        "training": st.fixed_dictionaries(
            {"steps": st.integers(1, 10**6)},
            optional={
                "learning_rate": st.floats(1e-300, 1e300),
                "micro_batch_size": st.sampled_from(["auto", 1, 32]),
                "clip_norm": st.sampled_from([None, 0.5, 3]),
                "precision": st.sampled_from(["auto", "fp32", "bf16"]),
            },
        ),
        "optimizer": st.fixed_dictionaries({"betas": st.tuples(st.floats(0, 0.9), st.just(0.5))}),
        "checkpoint": st.fixed_dictionaries({"every": st.sampled_from([1, 7, "10m", "3"])}),
        "samples": st.fixed_dictionaries({"prompts": st.lists(st.text(), max_size=3)}),
        "budget": st.fixed_dictionaries({"memory": st.sampled_from([None, 10**9, "8GB"])}),
    },
)


@given(recipes)
@settings(max_examples=60)
def test_plain_values_give_the_same_recipe_again(values):
    recipe = Recipe(**values)
    plain = json.loads(json.dumps(recipe.plain()))
    assert Recipe(**plain) == recipe
    assert Recipe(**plain).plain() == recipe.plain()
    assert differences(recipe.plain(), plain) == []


def test_a_resolved_recipe_with_a_model_from_a_path_loads_again():
    recipe = Recipe(model={"path": "base"}, adapter={"method": "lora", "rank": 2})
    of_a_path = {"path": "base", "trust_remote_code": False, "adapter": None}
    assert recipe.plain()["model"] == of_a_path
    assert Recipe(**recipe.plain()) == recipe


def test_differences_are_one_line_a_field():
    old = Recipe(training={"steps": 3}).plain()
    new = Recipe(training={"steps": 5}, adapter={"method": "lora"}, model={"path": "x"}).plain()
    lines = differences(old, new)
    assert "training.steps: 3 -> 5" in lines
    assert any(line.startswith("adapter: None -> {'method': 'lora', ") for line in lines)
    assert "model.path: None -> 'x'" in lines


def test_assigning_makes_sections_and_refuses_values():
    values: dict = {"a": {"b": 1}}
    assign(values, "a.c", 2)
    assign(values, "x.y.z", 3)
    assert values == {"a": {"b": 1, "c": 2}, "x": {"y": {"z": 3}}}
    with pytest.raises(InputError, match=r"^a\.b: is a value, not a section"):
        assign(values, "a.b.c", 1)


# The JSON schema


def accepts(schema: dict, value: object, root: dict) -> bool:
    """As much of JSON Schema as the recipe's own uses; an unknown keyword is an error here."""
    known = {"$defs", "$ref", "anyOf", "type", "properties", "required", "additionalProperties"}
    known |= {"items", "prefixItems", "enum", "const", "minimum", "maximum", "exclusiveMinimum"}
    known |= {"exclusiveMaximum", "minItems", "maxItems", "default", "title", "description"}
    known |= {"minLength", "maxLength"}
    assert schema.keys() <= known, schema.keys() - known
    if "$ref" in schema:
        return accepts(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], value, root)
    if "anyOf" in schema and not any(accepts(each, value, root) for each in schema["anyOf"]):
        return False
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    kinds |= {"integer": int, "number": (int, float)}
    wanted = schema.get("type", list(kinds))
    names = [wanted] if isinstance(wanted, str) else wanted
    if isinstance(value, bool) and "boolean" not in names:
        return False
    if not any(isinstance(value, kinds[name]) for name in names):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if isinstance(value, str):
        low, high = schema.get("minLength", 0), schema.get("maxLength", len(value))
        return bool(low <= len(value) <= high)
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        return set(schema.get("required", ())) <= value.keys() and all(
            accepts(properties[key], item, root) if key in properties else bool(others)
            for key, item in value.items()
        )
    if isinstance(value, list):
        shapes = schema.get("prefixItems", [schema.get("items", {})] * len(value))
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return False
        return all(accepts(*pair, root) for pair in zip(shapes, value, strict=False))
    if isinstance(value, int | float):
        low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        return (
            schema.get("minimum", value) <= value <= schema.get("maximum", value)
            and (low is None or value > low)
            and (high is None or value < high)
        )
    return True


@pytest.fixture(scope="module")
def schema() -> dict:
    return json_schema()


def test_the_schema_takes_what_recipes_are_made_of(schema):
    from modicum.recipe_yaml import parse, shipped

    assert json.loads(json.dumps(schema)) == schema
    assert shipped()
    for file in shipped().values():
        assert accepts(schema, parse(file.read_text(), file)[0], schema), file
    lora = {"model": {"path": "x"}, "adapter": {"method": "lora", "rank": 8, "targets": ["q_proj"]}}
    assert accepts(schema, lora, schema)
    assert accepts(
        schema, {"training": {"micro_batch_size": "auto"}, "budget": {"memory": "1GB"}}, schema
    )


@given(recipes)
@settings(max_examples=30)
def test_the_schema_takes_every_recipe_in_plain_values(schema, values):
    assert accepts(schema, json.loads(json.dumps(Recipe(**values).plain())), schema)


@pytest.mark.parametrize(
    "values",
    [
        {"trainin": {}},
        {"training": {"step": 3}},
        {"training": {"steps": "ten"}},
        {"training": {"steps": 0}},
        {"training": {"learning_rate": 0}},
        {"training": {"precision": "fp16"}},
        {"adapter": {"method": "lorra"}},
        {"adapter": {"rank": 3}},
        {"adapter": {"method": "lora", "rank": 0}},
        {"optimizer": {"betas": [0.9]}},
        {"model": {"mixer": "atention"}},
    ],
)
def test_the_schema_refuses_what_recipes_refuse(schema, values):
    assert not accepts(schema, values, schema)
    with pytest.raises(InputError):
        Recipe(**values)


def test_every_field_is_described_for_editors(schema):
    for name, section in schema["$defs"].items():
        if name.endswith("Section"):
            assert section["description"]
            undescribed = [k for k, v in section["properties"].items() if not v.get("description")]
            assert len(undescribed) <= 3, (name, undescribed)


def test_names_of_forms_are_those_that_there_are(schema):
    from modicum.models.mixers import MIXERS
    from modicum.models.mlps import MLPS

    model = schema["$defs"]["ModelSection"]["properties"]

    def words(field: str) -> set[str]:
        return set(model[field].get("enum", [model[field].get("const")]))

    assert [words(field) for field in ("mixer", "mlp")] == [set(MIXERS), set(MLPS)]


def test_an_old_name_of_a_form_says_what_to_write_now():
    with pytest.raises(InputError, match=r"model.linear.*`linear: \{method: nf4\}`"):
        Recipe(model={"linear": "nf4"})


STREAMED = {"data": {"path": "a.jsonl", "streaming": True}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"training": {"epochs": 2}}, r"training\.epochs: how many rows a stream has is not known"),
        ({"evaluation": {"rows": "all"}}, r"evaluation\.rows: of a part of a stream all rows"),
        (
            {"compress": {"method": "fwsvd"}, "model": {"path": "m"}},
            r"compress\.method: looks at data before training",
        ),
        (
            {"data": {"sources": [{"path": "a"}, {"path": "b"}], "streaming": True}},
            r"data\.sources\.0\.weight: .* mixed by weight",
        ),
        (
            {"task": {"method": "images", "data": "textures"}},
            r"task\.method: streams text to write alone",
        ),
        (
            {"data": {"path": "a.jsonl", "shuffle_buffer": 9}},
            r"data\.shuffle_buffer: is for data that is streamed",
        ),
    ],
)
def test_a_stream_refuses_what_needs_all_data(values, message):
    with pytest.raises(InputError, match=message):
        Recipe(**{**STREAMED, **values})


def test_a_stream_refuses_an_adapter_that_looks_at_data(monkeypatch):
    values = {**STREAMED, "model": {"path": "m"}, "adapter": {"method": "lora"}}
    Recipe(**values)
    traits = frozenset(["adapts_base", "prepares_from_data"])
    monkeypatch.setattr(MethodRecord, "traits", lambda *_: traits)
    with pytest.raises(InputError, match=r"adapter\.method: looks at data before training"):
        Recipe(**values)


def test_the_package_gives_the_recipe_without_torch():
    code = "import sys, modicum; modicum.Recipe(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert modicum.Recipe is Recipe
    assert Path(modicum.__file__).name == "__init__.py"


def every_field():
    """Dotted names of all fields: of the sections, and of each method in its section."""
    for name, field in Recipe.model_fields.items():
        inner = getattr(Recipe(), name) if field.annotation else None
        yield name
        if hasattr(type(inner), "model_fields"):
            yield from (f"{name}.{each}" for each in type(inner).model_fields)
    for slot in SLOTS:
        for method, record in methods_for(slot).items():
            yield from (f"{slot}.{method}.{each}" for each in record.fields)


@pytest.mark.parametrize("value", ["word", -1, 1.5, None, ["x", 3], {"a": 1}, "-5MB"], ids=repr)
def test_no_message_is_in_the_words_of_the_library_that_checks(value):
    said = {}
    for name in every_field():
        slot, method, field = (*name.split("."), None, None)[:3]
        values = {slot: value} if method is None else {slot: {method: value}}
        if field is not None:
            values = {slot: {"method": method, field: value}}
        try:
            Recipe(**values)
        except InputError as error:
            said[name] = str(error)
    strange = re.compile("Value error|nput should|pydantic|validation error")
    assert {name: text for name, text in said.items() if strange.search(text)} == {}
    assert len(said) > 50

"""What the table of combinations allows is trained, all of it at once, on two ranks."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool

from modicum.checkpoint import CheckpointStore
from modicum.core.contracts.catalog import catalog
from modicum.core.contracts.trait_rules import RULES
from modicum.core.errors import InputError, ModicumError
from modicum.core.ranks.ranks import Ranks
from modicum.optim.coded_rows import is_coded
from modicum.planner.choose import choices
from modicum.planner.combinations import (
    BASE,
    COLUMNS,
    PROVEN,
    RANKS,
    SETTINGS,
    STRATEGIES,
    CombinationRow,
    refusal,
    rows,
)
from modicum.recipe import Recipe
from modicum.trainer import compiled_blocks, continued, train

STEPS = 6
ROWS = {row.name: row for row in rows()}
# Adapters once more, on a quantized base.
QUANTIZED = [name for name, row in ROWS.items() if refusal(row, "quantized") is None]
# Noise of four bits, bounds that follow from a rank's own momentum, and signs of tiny gradients
# are not to the last digit; nor is bf16. Of gradients of rank 2 the first updates have a part.
CLOSE = {"sdp4bit": 3e-2, "powersgd": 5e-2, "acp_sgd": 5e-2}
DATA = {"column": "answer", "prompt_column": "question"}
NEW = {"layers": 2, "width": 36, "heads": 2, "vocabulary_size": 300}
# Optimizers that keep moments in a subspace or as codes, the names of what only such state has, and
# the shapes of factors that have it.
OF_FEW_NUMBERS: dict[str, tuple[dict[str, Any], tuple[str, ...], Callable[..., bool]]] = {
    "galore": (
        {"method": "galore", "rank": 1, "update_gap": 2, "scale": 1.0},
        ("left", "right"),
        lambda shape: len(shape) == 2,
    ),
    "adamw8bit": (
        {"method": "adamw8bit", "smallest": 16},
        ("exp_avg_scale",),
        partial(is_coded, smallest=16),
    ),
}
# What an exchange sends of a model of which most is frozen.
ADAPTED = [name for name, row in ROWS.items() if row.record.room == "comm" and name != "c4"]
# Exchanges that take weights sharded inside a host, and one method of each other room.
ON_FOUR = [name for name in ADAPTED if refusal(ROWS[name], "hybrid") is None]
ON_FOUR += ["low_rank", "lora", "soap", "galore", "mos", "fwsvd"]
ADAPTERS = [row for name, row in ROWS.items() if name in catalog() and "adapts_base" in row.traits]


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSONL with prompts of very different lengths: ranks train unequal numbers of tokens."""
    file = tmp_path_factory.mktemp("questions") / "data.jsonl"
    asked = (
        {"question": "why " * (n % 9) * (n % 4) + "? ", "answer": f"as {n % 5} is a tree"}
        for n in range(120)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in asked))
    return file


@pytest.fixture(scope="session")
def base(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model."""
    folder = tmp_path_factory.mktemp("base") / "run"
    assert trains(Ranks(), completed({}, questions, None), folder) == "done"
    return folder


def completed(
    asked: Mapping[str, Any], questions: Path, base: Path | None, **training: Any
) -> dict[str, Any]:
    """A recipe of a few steps with what is asked; seven rows an update, so ranks are unequal."""
    rate = 2e-2 if "adapter" in asked else 1e-3
    values: dict[str, Any] = {
        "training": {"steps": STEPS, "batch_size": 7, "learning_rate": rate},
        "evaluation": {"every": 3, "rows": 5},
        "checkpoint": {"every": 2},
        "samples": {"count": 0},
    }
    if "takes_no_rate" in ROWS[asked.get("optimizer", {}).get("method", "adamw")].traits:
        del values["training"]["learning_rate"]
    if "task" not in asked:
        length = {"sequence_length": 24, "validation_fraction": 0.1}
        values["data"] = {"path": str(questions), **DATA, **length}
        if asked.get("model", {}).get("path") != BASE:
            values["model"] = NEW
    for section, fields in {**asked, "training": {**asked.get("training", {}), **training}}.items():
        values[section] = values.get(section, {}) | fields
    if values.get("model", {}).get("path") == BASE:
        values["model"] = {**values["model"], "path": str(base)}
    return values


def trains(
    ranks: Ranks, values: dict[str, Any], folder: Path, stop_after: int | None = None
) -> str:
    """Train as a rank; the first one sends itself SIGTERM after some steps. How it ended."""

    def listener(told: dict[str, Any]) -> None:
        if ranks.first and told["event"] == "step" and told["step"] == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        made = continued(Recipe(**values), folder, ranks=ranks)
        train(made, folder, ranks=ranks, listener=listener)
    except ModicumError as error:
        return f"{error.exit_code}: {error}"
    return "done"


def metrics(folder: Path, kind: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics(folder)]


def outcome(folder: Path) -> dict[str, Any]:
    """What is a function of the recipe and the ranks, to the bit."""
    keys = ("step", "loss", "gradient_norm", "learning_rate", "tokens")
    weights = sorted(folder.glob("*/*.safetensors"))
    return {
        "rows": [[row[key] for key in keys] for row in metrics(folder)],
        "weights": {str(file.relative_to(folder)): file.read_bytes() for file in weights},
    }


@pytest.fixture
def collects_little() -> Iterator[None]:
    """A run's collections of garbage, half of its time here, look at its own objects alone."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def eager_tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks traced and differentiated as for inductor, without its compiler, which takes long."""
    torch.compiler.reset()
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **more: compile_(function, backend="aot_eager", **more)
    )
    compiled_blocks._function.cache_clear()
    yield
    compiled_blocks._function.cache_clear()
    torch.compiler.reset()


def all_at_once(row: CombinationRow, *more: str) -> tuple[dict[str, Any], str]:
    """A recipe with every setting that the row allows, and the strategy that shards most."""
    asked: dict[str, Any] = {}
    for column in ("accumulation", "bf16", *more):
        if refusal(row, column) is None:
            for section, fields in SETTINGS[column].items():
                asked[section] = asked.get(section, {}) | fields
    for strategy in ("fsdp", "zero", "ddp"):
        values = row.recipe(asked | STRATEGIES[strategy])
        with suppress(InputError):
            next(choices(Recipe(**values), "cpu", RANKS))
            return values, strategy
    raise AssertionError(f"no strategy takes {row.name} with {', '.join(more)}")


def without_wire(values: dict[str, Any]) -> dict[str, Any]:
    """The same updates in one process."""
    return {key: value for key, value in values.items() if key not in ("comm", "parallel")}


def marked(name: str, *more: str) -> Any:
    return pytest.param(ROWS[name], more, id=" on ".join((name, *more)))


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("row", "more"),
    [
        *(marked(name) for name in ROWS),
        *(marked(name, "quantized") for name in QUANTIZED),
        *(marked(name, "adapters") for name in ADAPTED),
    ],
)
def test_a_row_runs_with_all_that_it_allows(
    pool: Pool,
    questions: Path,
    base: Path,
    tmp_path: Path,
    row: CombinationRow,
    more: tuple[str, ...],
) -> None:
    asked, _ = all_at_once(row, *more)
    values = completed(asked, questions, base)

    def run(folder: str, stop_after: int | None = None) -> set[str]:
        return set(pool.run(trains, values, tmp_path / folder, stop_after, ranks=2))

    assert run("run") == {"done"}
    found = losses(tmp_path / "run")
    assert len(found) == STEPS
    assert found[-1] < found[0]
    assert trains(Ranks(), without_wire(values), tmp_path / "alone") == "done"
    tolerance = CLOSE.get(row.record.name, 1e-2)
    assert found == pytest.approx(losses(tmp_path / "alone"), rel=tolerance)
    assert all(said.startswith("4: ") for said in run("stopped", 3))
    assert run("stopped") == {"done"}
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "run")


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize("name", ON_FOUR)
def test_a_row_runs_where_weights_are_sharded_inside_each_of_two_hosts(
    pool: Pool, questions: Path, base: Path, tmp_path: Path, name: str
) -> None:
    values = completed(ROWS[name].recipe(STRATEGIES["hybrid"]), questions, base)

    def run(folder: str, stop_after: int | None = None) -> set[str]:
        return set(pool.run(trains, values, tmp_path / folder, stop_after, ranks=4))

    assert run("run") == {"done"}
    assert trains(Ranks(), without_wire(values), tmp_path / "alone") == "done"
    close = pytest.approx(losses(tmp_path / "alone"), rel=CLOSE.get(name, 1e-2))
    assert losses(tmp_path / "run") == close
    assert all(said.startswith("4: ") for said in run("stopped", 3))
    assert run("stopped") == {"done"}
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "run")


@pytest.mark.expensive
@pytest.mark.usefixtures("eager_tracing")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "row",
    [
        row
        for row in ROWS.values()
        if refusal(row, "compile") is None and "crosses_wire" not in row.traits
    ],
    ids=lambda row: row.name,
)
def test_a_row_that_compiles_computes_the_same(
    questions: Path, base: Path, tmp_path: Path, row: CombinationRow
) -> None:
    values = completed(row.recipe(SETTINGS["compile"]), questions, base)
    assert trains(Ranks(), values, tmp_path / "compiled") == "done"
    values["training"] = {**values["training"], "compile": "none"}
    assert trains(Ranks(), values, tmp_path / "eager") == "done"
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=1e-4)


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "row",
    [row for row in ROWS.values() if row.record.room in ("optim", "linears", "compress")],
    ids=lambda row: row.name,
)
def test_a_row_resumes_on_two_ranks_and_on_one_again(
    pool: Pool, questions: Path, base: Path, tmp_path: Path, row: CombinationRow
) -> None:
    more = ("quantized",) if row.name in QUANTIZED else ()
    values = completed(all_at_once(row, *more)[0], questions, base)
    alone, run = without_wire(values), tmp_path / "run"
    assert trains(Ranks(), alone, run, 2).startswith("4: ")
    assert all(said.startswith("4: ") for said in pool.run(trains, values, run, 4, ranks=2))
    assert trains(Ranks(), alone, run) == "done"
    assert trains(Ranks(), alone, tmp_path / "alone") == "done"
    assert losses(run) == pytest.approx(losses(tmp_path / "alone"), rel=1e-2)


# Of exchanges with state each way to share a model once.
KEPT: list[tuple[str, dict[str, Any]]] = [
    ("powersgd", {"strategy": "ddp"}),
    ("acp_sgd", {"strategy": "zero"}),
    ("powersgd", {"strategy": "fsdp"}),
    ("sdp4bit", {"strategy": "zero"}),
    ("sdp4bit", {"strategy": "fsdp", "reshard_after_forward": False}),
]


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "parallel"), KEPT, ids=str)
def test_an_exchange_resumes_on_two_ranks_and_on_one_again(
    pool: Pool,
    questions: Path,
    base: Path,
    tmp_path: Path,
    name: str,
    parallel: dict[str, Any],
) -> None:
    values = completed(ROWS[name].recipe({"parallel": parallel}), questions, base)
    run = tmp_path / "run"
    assert trains(Ranks(), values, run, 2).startswith("4: ")
    assert all(said.startswith("4: ") for said in pool.run(trains, values, run, 4, ranks=2))
    assert trains(Ranks(), values, run) == "done"
    assert trains(Ranks(), values, tmp_path / "alone") == "done"
    close = pytest.approx(losses(tmp_path / "alone"), rel=CLOSE[name])
    assert losses(run) == close


# Two methods that meet in the same place of a step.
@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize("pair", [("comet", "dear"), ("mos", "galore")], ids=" and ".join)
def test_a_pair_runs(
    pool: Pool, questions: Path, base: Path, tmp_path: Path, pair: tuple[str, str]
) -> None:
    one, other = (ROWS[name] for name in pair)
    values = completed(one.recipe(STRATEGIES["ddp"], other.recipe()), questions, base)

    def run(folder: str, stop_after: int | None = None) -> set[str]:
        return set(pool.run(trains, values, tmp_path / folder, stop_after, ranks=2))

    assert run("run") == {"done"}
    assert all(said.startswith("4: ") for said in run("stopped", 3))
    assert run("stopped") == {"done"}
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "run")
    assert trains(Ranks(), without_wire(values), tmp_path / "alone") == "done"
    close = pytest.approx(losses(tmp_path / "alone"), rel=1e-2)
    assert losses(tmp_path / "run") == close


def on_forms() -> Iterator[tuple[CombinationRow, str, str]]:
    """Each adapter with both optimizers of few numbers, on int8 with one, on tiles with one."""
    for index, row in enumerate(ADAPTERS):
        for place, optimizer in enumerate(OF_FEW_NUMBERS):
            yield row, optimizer, ("int8", "tiles")[(index + place) % 2]


def with_few_numbers(row: CombinationRow, optimizer: str, form: str | None) -> dict[str, Any]:
    """A recipe's sections; without a form on the dense base."""
    asked = row.recipe({"optimizer": OF_FEW_NUMBERS[optimizer][0]})
    if form is not None:
        asked["linear"] = {"method": form, **ROWS[form].fields}
    return asked


def refused_on(row: CombinationRow, optimizer: str, form: str) -> InputError | None:
    """Why an adapter does not go with both by the table of traits."""
    try:
        next(choices(Recipe(**with_few_numbers(row, optimizer, form)), "cpu", 1))
    except InputError as error:
        return error
    return None


ON_FORMS = [(*each, refused_on(*each)) for each in on_forms()]


@pytest.mark.expensive
@pytest.mark.usefixtures("collects_little")
@pytest.mark.parametrize(
    ("row", "optimizer", "form"),
    [
        pytest.param(row, optimizer, found, id=f"{row.name} by {optimizer} on {found or 'dense'}")
        for row, optimizer, form, refused in ON_FORMS
        for found in [form if refused is None else None]
    ],
)
def test_an_adapter_trains_with_state_of_few_numbers_on_a_base_of_few_bits(
    questions: Path,
    base: Path,
    tmp_path: Path,
    row: CombinationRow,
    optimizer: str,
    form: str | None,
) -> None:
    values = completed(with_few_numbers(row, optimizer, form), questions, base)
    run, stopped = tmp_path / "run", tmp_path / "stopped"
    assert trains(Ranks(), values, run) == "done"
    assert len(losses(run)) == STEPS
    assert all(map(math.isfinite, losses(run)))
    # Of the same rows; those of an update are others each time.
    evaluated = [row["loss"] for row in metrics(run, "evaluations")]
    assert evaluated[-1] <= evaluated[0]
    newest = CheckpointStore(run / "checkpoints").newest()
    assert newest is not None
    state, (_, names, meant) = newest.state, OF_FEW_NUMBERS[optimizer]
    kept = [name.rpartition("/")[::2] for name in state["optimizer"]]
    of_few = {factor for factor, name in kept if name in names}
    assert of_few == {factor for factor, _ in kept if meant(state["model"][factor].shape)}
    assert trains(Ranks(), values, stopped, 3).startswith("4: ")
    assert len(losses(stopped)) == 3
    assert trains(Ranks(), values, stopped) == "done"
    assert outcome(stopped) == outcome(run) or "exact_resume" not in row.traits


@pytest.mark.parametrize(
    ("row", "optimizer", "form", "refused"),
    [
        pytest.param(*each, id=f"{each[0].name} by {each[1]} on {each[2]}")
        for each in ON_FORMS
        if each[3] is not None
    ],
)
def test_an_adapter_that_a_form_does_not_go_with_is_refused_with_a_sentence(
    tmp_path: Path, row: CombinationRow, optimizer: str, form: str, refused: InputError
) -> None:
    sentences = [*(rule.why for rule in RULES), *(why for _, why in row.record.info.excludes)]
    assert any(why in str(refused) for why in sentences)
    # Before data and model are looked for.
    values = completed(with_few_numbers(row, optimizer, form), tmp_path / "no", tmp_path / "none")
    assert trains(Ranks(), values, tmp_path / "run") == f"2: {refused}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("names", "settings", "sentence"),
    [
        (["galore, in_backward: True"], {"training": {"clip_norm": 1.0}}, "norm is never known"),
        (["eva", "lora"], {}, "an adapter freezes the weights that it works on"),
        (["mkor", "lora"], {}, "an adapter freezes the weights that it works on"),
        (["mkor"], {"training": {"compile": "blocks"}}, "which compiled blocks do not show"),
        (["mkor", "galore, in_backward: True"], {}, "the other needs them all together first"),
        (["dear", "eva"], {}, "weights are updated in the next forward pass"),
        (["dear", "galore, in_backward: True"], {}, "weights are updated in the next forward"),
        (["comet"], {"task": None}, "this model has none"),
        (["fwsvd"], {"model": {"path": None}}, "this model starts from random ones"),
        (["welore"], {"model": {"path": None}}, "this model starts from random ones"),
        (
            [],
            {"model": {"path": BASE}, "linear": {"method": "nf4"}},
            "a quantized weight is not trained",
        ),
        (["fwsvd", "low_rank"], {"model": {"path": BASE}}, "it begins with dense weights"),
        (["comet", "low_rank"], {}, "no layers that take another form"),
        (
            ["sdp4bit"],
            {"parallel": {"strategy": "fsdp", "reshard_after_forward": True}},
            "which must stay gathered",
        ),
        (["powersgd", "galore, in_backward: True"], {}, "is owed once its update is made"),
        (["distzo2"], {"training": {"clip_norm": 1.0}}, "so there are no gradients to clip"),
        (["distzo2"], {"training": {"recompute": "blocks"}}, "that could be computed again"),
        (["distzo2"], {"parallel": {"strategy": "zero"}}, "zero's optimizer trains others"),
        (["distzo2", "eva"], {}, "so there are no gradients to change"),
        (["distzo2", "powersgd"], {}, "so ranks exchange no gradients"),
        (["distzo2", "comet"], {}, "so nothing is saved for a backward pass"),
        (["distzo2", "sst"], {}, "its vectors are kept at length 1"),
        (["admm_rnn"], {"task": None}, "set task.method to sequences"),
        (["admm_rnn"], {"training": {"precision": "bf16"}}, "set training.precision to fp32"),
        (["admm_rnn"], {"parallel": {"strategy": "fsdp"}}, "it solves for full weights"),
        (["lora", "sst"], {}, "a form to be trained in"),
        (["lora", "maestro"], {}, "merge the adapter first"),
        (["lora", "lost, activation: silu"], {}, "a form to be trained in"),
        (["dora", "low_rank"], {"model": {"path": BASE}}, "a form to be trained in"),
        (["maestro", "dear"], {}, "full gradients are never together"),
        (["maestro", "galore, in_backward: True"], {}, "the other needs them all together first"),
        (["maestro", "mkor"], {}, "has no such rows"),
        (
            ["nadamw, in_backward: True"],
            {"training": {"micro_batch_size": 2}},
            "none are left to accumulate",
        ),
        (["welore", "monarch"], {"model": {"path": BASE}}, "it begins with dense weights"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_a_rule_forbids_is_refused(
    names: list[str], settings: dict[str, Any], sentence: str
) -> None:
    values: dict[str, Any] = {}
    for name in names:
        for section, fields in ROWS[name].recipe().items():
            values[section] = {**values.get(section, {}), **fields}
    for section, fields in settings.items():
        values[section] = None if fields is None else {**values.get(section, {}), **fields}
    ranks = 2 if "comm" in values or "parallel" in values else 1
    with pytest.raises(InputError, match=sentence):
        next(choices(Recipe(**values), "cpu", ranks))


def test_the_table_refuses_micro_batches_where_gradients_are_used_up_at_once() -> None:
    row = ROWS["nadamw, in_backward: True"]
    assert "none are left to accumulate" in str(refusal(row, "accumulation"))
    assert refusal(ROWS["nadamw"], "accumulation") is None


def test_every_sentence_of_the_table_is_a_rule_s_or_a_method_s_own() -> None:
    asked = [(row, column) for row in ROWS.values() for column in COLUMNS if column not in PROVEN]
    refused = [error for row, column in asked if (error := refusal(row, column)) is not None]
    assert refused
    sentences = [rule.why for rule in RULES]
    sentences += [f"it stands in the section {slot} itself" for slot in ("linear", "adapter")]
    sentences += [why for row in ROWS.values() for _, why in row.record.info.excludes]
    assert all(any(why in str(error) for why in sentences) for error in refused)


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_each_method_shows_how_it_is_used_alone(row: CombinationRow) -> None:
    assert ">>>" in (row.record.load().__doc__ or "")
    row.record.validate(row.fields)

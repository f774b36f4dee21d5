"""Shapes change in the middle of a run: state, kills, ranks, files, and what is refused."""

from __future__ import annotations

import gc
import json
import os
import signal
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tests.trainer.test_ranks import DDP, FSDP, column, outcome, recipe_of, rows, trains
from torch import Tensor, nn

import modicum
from modicum.checkpoint import CheckpointStore
from modicum.core.contracts.state import StateRegistry, model_view
from modicum.core.contracts.surgery import Surgery, mapped
from modicum.core.errors import InputError
from modicum.core.layers.meta import on_meta
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.linears import Monarch, rank_surgery
from modicum.models.config import ModelConfig
from modicum.models.llama import Llama
from modicum.recipe import Recipe
from modicum.trainer import continued, loop, train
from modicum.trainer.folder import operated_at
from modicum.trainer.held_state import hold

PLUGIN = Path(__file__).parents[1] / "contracts" / "plugins" / "shrinking.py"
ZERO = {"strategy": "zero"}
STEPS = (4, 6, 9)  # the first with a checkpoint of its own step, the others between two
RANK = 6
WAYS = [(1, {}), (2, DDP), (2, FSDP), (2, ZERO)]
NAMES = ["alone", "ddp", "fsdp", "zero"]


def values(data: Path, base: Path, **sections: Any) -> dict[str, Any]:
    """12 updates of a model of low-rank layers that lose a rank after three of them."""
    made = recipe_of(
        data,
        training={"steps": 12, "schedule": "constant"},
        compress={"method": "fwsvd", "rank": RANK, "examples": 16},
        optimizer={"method": "shrinking", "steps": STEPS},
        checkpoint={"every": 4, "asynchronous": False},
    )
    made |= {"model": {"path": str(base)}, "plugins": [str(PLUGIN)]}
    for name, section in sections.items():
        made[name] = made.get(name, {}) | section
    return made


@pytest.fixture(scope="module")
def base(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little trained model of dense layers."""
    folder = tmp_path_factory.mktemp("base") / "run"
    sections = {"evaluation": {"every": 99}, "checkpoint": {"every": 99}}
    assert (
        trains(Ranks(), recipe_of(questions, training={"steps": 3}, **sections), folder) == "done"
    )
    return folder


class Watch:
    """What surgeries of a run do, seen from the loop: full state before and after each."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self._operate = loop.operate_if_asked

    def __call__(self, session: Any) -> None:
        due = session.step in STEPS
        before, old = (state(session), weakref.ref(session.model)) if due else ({}, None)
        self._operate(session)
        if old is None:
            return
        gc.collect()
        after, surgery = state(session), session.plan.surgeries[-1]
        self.seen.append(
            {
                "freed": old() is None,
                "moved": moved(before, after, surgery),
                "apart": apart(session, before, after, surgery),
                "same": all(before[key] == after[key] for key in ("groups", "step")),
                "random": torch.equal(before["random"]["cpu"], after["random"]["cpu"]),
            }
        )


def state(session: Any) -> dict[str, Any]:
    """All state of a run, full tensors as copies, and the optimizer's groups."""
    read = {
        name: {key: whole(v).clone() if isinstance(v, Tensor) else v for key, v in view.items()}
        for name, view in session.registry.read().items()
    }
    kept = ("names", "base_learning_rate", "weight_decay", "matrix", "kind")
    groups = session.step_program.optimizer.param_groups
    return {
        **read,
        "groups": [{key: group[key] for key in kept} for group in groups],
        "step": session.step,
        "config": session.config,
    }


def moved(before: Mapping[str, Any], after: Mapping[str, Any], surgery: Surgery) -> bool:
    """Whether weights and moments are to the bit what they were, rows that went apart."""
    for view in ("model", "optimizer"):
        if before[view].keys() != after[view].keys():
            return False
        for key, old in before[view].items():
            maps = surgery.rows.get(key.split("/")[0], ()) if old.numel() > 1 else ()
            if not torch.equal(mapped(old, maps), after[view][key]):
                return False
    return len(before["optimizer"]) == 3 * len(before["model"])


@torch.no_grad()
def apart(
    session: Any, before: Mapping[str, Any], after: Mapping[str, Any], surgery: Surgery
) -> float:
    """How far the outputs are from those of the old model without the components that went."""
    weights = {name: value.clone() for name, value in before["model"].items()}
    for name in surgery.layers:
        (rows_of,) = surgery.rows[f"{name}.down"]
        gone = set(range(len(weights[f"{name}.down"]))) - set(rows_of.kept)
        weights[f"{name}.down"][sorted(gone)] = 0.0
    batch = session.data.train.batch([0, 1])
    one, two = (
        of_weights(config, held)(batch.input_ids, batch.documents)
        for config, held in ((before["config"], weights), (after["config"], after["model"]))
    )
    return float((one - two).abs().max())


def of_weights(config: ModelConfig, weights: Mapping[str, Tensor]) -> Llama:
    with on_meta():
        model = Llama(config)
    model.load_state_dict(dict(weights), assign=True)
    return model.double().eval()


def watched(ranks: Ranks, made: dict[str, Any], folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """Train as a rank, and look at each surgery."""
    watch, before = Watch(), loop.operate_if_asked
    loop.operate_if_asked = watch
    try:
        return trains(ranks, made, folder), watch.seen
    finally:
        loop.operate_if_asked = before


def killed(ranks: Ranks, made: dict[str, Any], folder: Path, event: str, number: int) -> None:
    """Train as one of ranks that are all killed when `event` comes for the `number`-th time."""
    seen = 0

    def listener(told: dict[str, Any]) -> None:
        nonlocal seen
        seen += event in (told["event"], told.get("name"))
        if seen == number:
            try:
                ranks.sum(0)  # all have come to it, so that what is on the disk is known
            finally:
                os.kill(os.getpid(), signal.SIGKILL)

    train(continued(Recipe(**made), folder, ranks=ranks), folder, ranks=ranks, listener=listener)


def surgeries(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows(folder, "plan") if "surgery" in row]


def ranks_of(folder: Path) -> set[int]:
    forms = json.loads((folder / "config.json").read_text())["forms"]
    return {form["rank"] for form in forms["layers"].values()}


@pytest.fixture(scope="module")
def alone(questions: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, each of whose surgeries was looked at."""
    folder = tmp_path_factory.mktemp("surgery") / "run"
    ended, seen = watched(Ranks(), values(questions, base), folder)
    assert ended == "done"
    check(seen)
    return folder


@dataclass(frozen=True)
class Calm:
    """A run that nothing disturbed, on so many ranks."""

    ranks: int
    made: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module", params=WAYS, ids=NAMES)
def calm(
    request: pytest.FixtureRequest,
    pool: Pool,
    alone: Path,
    questions: Path,
    base: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Calm:
    """The same in each way, each of whose surgeries was looked at."""
    ranks, parallel = request.param
    made = values(questions, base, parallel=parallel)
    if ranks == 1:
        return Calm(ranks, made, alone)
    folder = tmp_path_factory.mktemp("calm") / "run"
    for ended, seen in pool.run(watched, made, folder, ranks=ranks):
        assert ended == "done"
        check(seen)
    return Calm(ranks, made, folder)


def check(seen: list[dict[str, Any]]) -> None:
    assert len(seen) == len(STEPS)
    for each in seen:
        assert all(each[key] for key in ("freed", "moved", "same", "random")), each
        assert each["apart"] < 1e-9


@pytest.mark.expensive
@pytest.mark.ranks
def test_it_is_a_revision_of_the_plan_and_files_have_the_new_shapes(alone: Path) -> None:
    written, revisions = surgeries(alone), rows(alone, "plan")
    assert [row["surgery"]["step"] for row in written] == list(STEPS)
    assert [row["revision"] for row in revisions] == list(range(1, len(revisions) + 1))
    peaks = [row["prediction"]["peak_bytes"] for row in (revisions[0], *written)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4
    record = json.loads((alone / "run.json").read_text())
    assert record["parameters"] == written[-1]["parameters"]
    assert record["parameters"]["total"] < revisions[0]["parameters"]["total"]
    assert record["peak_bytes"]["predicted"] == peaks[0]
    assert ranks_of(alone / "base") == {RANK}
    assert ranks_of(alone / "compressed") == {RANK - 3}
    assert "forms" not in json.loads((alone / "model/config.json").read_text())
    newest = CheckpointStore(alone / "checkpoints").newest()
    assert newest is not None
    down = "model.layers.0.mlp.up_proj.down"
    assert newest.state["model"][down].shape == (RANK - 3, 36)
    assert newest.state["optimizer"][f"{down}/exp_avg"].shape == (RANK - 3, 36)
    losses = column(alone, "loss")
    assert losses[-1] < losses[0]


@pytest.mark.expensive
@pytest.mark.ranks
def test_two_ranks_do_what_one_process_does(calm: Calm, alone: Path) -> None:
    assert column(calm.folder, "loss") == pytest.approx(column(alone, "loss"), rel=1e-3)
    one, two = ([row["surgery"] for row in surgeries(run)] for run in (calm.folder, alone))
    assert one == two


@pytest.mark.expensive
@pytest.mark.ranks
def test_killed_on_either_side_of_it_runs_resume_to_the_bit(
    pool: Pool, calm: Calm, tmp_path: Path
) -> None:
    made, run = calm.made, tmp_path / "run"
    for event, number, steps, left in [
        ("changing shapes", 1, [4], 4),  # the revision is written, and there is no checkpoint
        ("step", 3, [], 3),  # before the first
        ("surgery", 2, [4, 6], 6),  # after the second, whose state no checkpoint has seen
        ("changing shapes", 2, [4, 6, 9], 9),  # resumes after the first, and comes to the third
        ("step", 2, [4, 6, 9], 10),  # resumes after the second; after the third
    ]:
        if calm.ranks > 1 and event == "step":
            continue  # ranks take seconds to start again
        lost = tuple(range(calm.ranks))
        pool.run(killed, made, run, event, number, ranks=calm.ranks, lost=lost)
        assert [row["surgery"]["step"] for row in surgeries(run)] == steps, event
        assert rows(run)[-1]["step"] == left
    assert pool.run(trains, made, run, ranks=calm.ranks) == ["done"] * calm.ranks
    assert outcome(run) == outcome(calm.folder)
    one, two = (
        [(row["surgery"], row["prediction"]["peak_bytes"]) for row in surgeries(folder)]
        for folder in (run, calm.folder)
    )
    assert one == two
    assert ranks_of(run / "compressed") == {RANK - 3}


@pytest.mark.expensive
@pytest.mark.ranks
def test_other_ranks_take_up_what_was_left_and_forks_too(
    pool: Pool, alone: Path, questions: Path, base: Path, tmp_path: Path
) -> None:
    run, fork = tmp_path / "run", tmp_path / "fork"
    made = values(questions, base)
    assert trains(Ranks(), made, run, (0, 7)).startswith("4: stopped")
    assert pool.run(trains, values(questions, base, parallel=FSDP), run, ranks=2) == ["done"] * 2
    assert column(run, "loss") == pytest.approx(column(alone, "loss"), rel=1e-3)
    longer = values(questions, base, training={"steps": 14})
    for _ in range(2):  # the second one finds it finished
        assert trains(Ranks(), longer, fork, None, alone) == "done"
    assert [row["surgery"]["step"] for row in surgeries(fork)] == list(STEPS)
    assert ranks_of(fork / "compressed") == {RANK - 3}
    assert trains(Ranks(), longer, run) == "done"  # the run itself, extended
    assert column(run, "loss")[-1] == pytest.approx(column(fork, "loss")[-1], rel=1e-3)


@pytest.mark.expensive
def test_what_it_made_is_a_model_that_other_runs_begin_with(
    alone: Path, questions: Path, tmp_path: Path
) -> None:
    made = values(questions, alone / "compressed", optimizer={"steps": (2, 3)})
    made |= {
        "training": made["training"] | {"steps": 3, "precision": "bf16", "recompute": "blocks"}
    }
    del made["compress"]
    assert trains(Ranks(), made, tmp_path / "small") == "done"
    # After the last step too, so that a run that is extended has what a longer one would have.
    assert [operated_at(row) for row in surgeries(tmp_path / "small")] == [2, 3]
    assert ranks_of(tmp_path / "small/compressed") == {RANK - 5}
    plain = recipe_of(questions, training={"steps": 2})
    plain |= {"model": {"path": str(alone)}}
    assert trains(Ranks(), plain, tmp_path / "dense") == "done"


@pytest.mark.expensive
def test_what_was_written_wrong_is_named(
    alone: Path, questions: Path, base: Path, tmp_path: Path
) -> None:
    made = values(questions, base)
    assert trains(Ranks(), made, tmp_path, (0, 5)).startswith("4: stopped")
    file = tmp_path / "plan.jsonl"
    right = file.read_text()
    for wrong, why in (
        (right.replace('"rank": 5', '"rank": 4', 1), "mapped to"),
        (right.replace('"rank": 5', '"rank": "x"', 1), "expected an integer"),
        (right.replace('"kept"', '"keeps"'), "no surgery"),
    ):
        file.write_text(wrong)
        ended = trains(Ranks(), made, tmp_path)
        assert ended.startswith("2: ")
        assert "plan.jsonl" in ended
        assert why in ended
    file.write_text(right)
    assert trains(Ranks(), made, tmp_path) == "done"
    assert outcome(tmp_path) == outcome(alone)
    peak = json.loads((tmp_path / "run.json").read_text())["peak_bytes"]
    assert peak["predicted"] == pytest.approx(peak["measured"], rel=0.15)


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"adapter": {"method": "lora"}, "compress": None}, "an adapter's factors"),
        ({"transform": {"method": "eva"}}, "has no such rows"),
        ({"comm": {"method": "dear"}}, "leave comm out"),
        ({"training": {"compile": "blocks"}}, "set training.compile to none"),
        ({"task": {"method": "images"}, "compress": None, "model": {}}, "no layer of this model"),
        ({"evaluation": {"keep_best": True}}, "weights of earlier shapes cannot be exported"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    questions: Path, base: Path, section: dict[str, Any], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        modicum.Recipe(**(values(questions, base) | section))


def test_a_hook_without_the_trait_is_refused(questions: Path, base: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "shrinking.py"
    plugin.write_text(PLUGIN.read_text().replace('"changes_shapes"', '"compiles"'))
    made = values(questions, base) | {"plugins": [str(plugin)]}
    assert "trait changes_shapes" in trains(Ranks(), made, tmp_path / "run")


def test_state_of_another_shape_is_refused_by_its_name() -> None:
    registry, held = StateRegistry(), {"up.down/rows": torch.ones(4), "other/rows": torch.ones(4)}
    registry.add("optimizer", lambda: held, held.update)
    surgery = rank_surgery({"up": (0, 2)}, "smaller")
    with pytest.raises(InputError, match=r"optimizer keeps 'up.down/rows' of it as \(4,\)"):
        hold(registry, surgery, {"up.down": (4, 3), "up.up": (5, 4)}, nn.Module())
    held["up.down/rows"] = torch.ones(4, 3)
    moved = hold(registry, surgery, {"up.down": (4, 3)}, nn.Module())
    assert moved["optimizer"]["up.down/rows"].shape == (2, 3)


def test_state_of_a_layer_that_becomes_dense_is_refused_but_for_moments() -> None:
    layer = Monarch.layer.from_dense(torch.ones(4, 6), blocks=2, rank=1)
    model, registry = nn.ModuleDict({"up": layer}), StateRegistry()
    registry.add_view(model_view(model))
    registry.add("optimizer", lambda: {"up.first/exp_avg": torch.ones(3), "w/exp_avg": 1}, print)
    surgery = Surgery("merges", dense=("up",))
    held = hold(registry, surgery, {}, model)
    assert held["optimizer"] == {"w/exp_avg": 1}
    assert list(held["model"]) == ["up.weight"]
    assert torch.equal(held["model"]["up.weight"], layer.to_dense().detach())
    registry.add("owed", lambda: {"up.first": torch.ones(3)}, print)
    with pytest.raises(InputError, match="owed keeps state of its tensors"):
        hold(registry, surgery, {}, model)

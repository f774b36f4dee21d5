"""Maestro in runs: layers that become smaller on the way, kills, ranks, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from tests.trainer.test_ranks import DDP, FSDP, column, outcome, recipe_of, rows, trains

from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.models import ModelConfig, read_config
from modicum.recipe import Recipe
from modicum.verify import verify_export

ZERO = {"strategy": "zero"}


def values(data: Path, **sections: Any) -> dict[str, Any]:
    """12 updates, after some of which components go."""
    training = {"steps": 12, "schedule": "constant", "learning_rate": 1e-2}
    linear = {
        "method": "maestro", "penalty": 5e-4, "threshold": 0.3, "every": 3, "exclude": ["o_proj"]
    }  # fmt: skip
    return recipe_of(data, training=training, linear=linear, **sections)


@pytest.fixture(scope="module")
def alone(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("maestro") / "run"
    assert trains(Ranks(), values(questions), folder) == "done"
    return folder


def surgeries(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows(folder, "plan") if "surgery" in row]


@pytest.mark.expensive
def test_a_run_becomes_smaller_on_its_way(alone: Path) -> None:
    seen = surgeries(alone)
    assert len(seen) > 1
    assert column(alone, "loss")[-1] < column(alone, "loss")[0]
    assert all(term > 0 for term in column(alone, "extra_loss"))
    dense, small = (read_config(alone / name) for name in ("model", "compressed"))
    assert isinstance(dense, ModelConfig)
    sizes = {
        prefix + name: (rows * columns, rows + columns)
        for layer, prefix in enumerate(dense.block_prefixes())
        for name, (rows, columns, _) in dense.projections(layer).items()
    }
    ranks = {name: form.arguments["rank"] for name, form in small.forms.layers.items()}
    last: dict[str, int] = {}
    for row in seen:
        for name, arguments in row["surgery"]["layers"].items():
            assert arguments["rank"] < last.get(name, 1000)
            last[name] = arguments["rank"]
    # A layer of which too little was pruned is smaller as a dense weight.
    for name, rank in last.items():
        elements, sides = sizes[name]
        assert ranks.get(name) == (rank if rank * sides <= elements else None)
    assert len(set(ranks.values())) > 1, "ranks differ by layer"
    assert dense.forms.plain


@pytest.mark.expensive
def test_what_it_exported_is_what_was_trained_in_the_last_shapes(alone: Path) -> None:
    seen = verify_export(alone)
    assert seen.findings == []
    checks = {check["check"]: check for check in seen.checks}
    assert checks["exported"]["error"] < 1e-4
    assert checks["compressed"]["error"] < 1e-4


@pytest.mark.expensive
def test_killed_on_either_side_of_a_surgery_it_resumes(
    alone: Path, questions: Path, tmp_path: Path
) -> None:
    first = surgeries(alone)[0]["surgery"]["step"]
    for name, step in (("before", first - 1), ("after", first + 1)):
        assert trains(Ranks(), values(questions), tmp_path / name, (0, step)).startswith("4: ")
        assert trains(Ranks(), values(questions), tmp_path / name) == "done"
        assert outcome(tmp_path / name) == outcome(alone)


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize("parallel", [DDP, FSDP, ZERO], ids=["ddp", "fsdp", "zero"])
def test_two_ranks_do_what_one_process_does(
    pool: Pool, alone: Path, questions: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    made = values(questions, parallel=parallel)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    for key in ("loss", "extra_loss"):
        assert column(tmp_path / "run", key) == pytest.approx(column(alone, key), rel=1e-3)
    one, two = ([row["surgery"] for row in surgeries(run)] for run in (tmp_path / "run", alone))
    assert one == two
    # On one rank, two, and one again, a surgery among the updates of each.
    run, steps = tmp_path / "other", [each["step"] for each in two]
    assert trains(Ranks(), values(questions), run, (0, steps[0] + 1)).startswith("4: ")
    assert all(s[:2] == "4:" for s in pool.run(trains, made, run, (0, steps[1] + 1), ranks=2))
    assert trains(Ranks(), values(questions), run) == "done"
    assert column(run, "loss") == pytest.approx(column(alone, "loss"), rel=1e-3)
    assert [row["surgery"]["step"] for row in surgeries(run)] == steps


OPTIMIZERS: list[dict[str, Any]] = [
    {"method": "muon"},
    {"method": "galore", "rank": 2, "update_gap": 4},
    {"method": "adamw8bit", "smallest": 256},
]


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: str(each["method"]))
def test_other_optimizers_go_on_with_what_still_fits(
    pool: Pool, questions: Path, tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    """State in a matrix's rows moves; a subspace, and codes of what is too small, begin anew."""
    made = values(questions, optimizer=optimizer)
    assert trains(Ranks(), made, tmp_path / "calm") == "done"
    seen = [row["surgery"]["step"] for row in surgeries(tmp_path / "calm")]
    assert len(seen) > 1
    # Stopped before the first surgery, and after it; then on two ranks, that own other matrices.
    for step in (seen[0] - 1, seen[0] + 1):
        run = tmp_path / f"at {step}"
        assert trains(Ranks(), made, run, (0, step)).startswith("4: ")
        assert trains(Ranks(), made, run) == "done"
        assert outcome(run) == outcome(tmp_path / "calm")
    for parallel in (FSDP, ZERO):
        run = tmp_path / parallel["strategy"]
        shared = values(questions, optimizer=optimizer, parallel=parallel)
        assert pool.run(trains, shared, run, ranks=2) == ["done"] * 2
        assert column(run, "loss") == pytest.approx(column(tmp_path / "calm", "loss"), rel=1e-3)
        assert [row["surgery"]["step"] for row in surgeries(run)] == seen


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"adapter": {"method": "lora"}}, "starts from random ones|an adapter's factors"),
        ({"comm": {"method": "dear"}}, "leave comm out|full gradients"),
        ({"training": {"compile": "blocks"}}, "set training.compile to none"),
        ({"transform": {"method": "eva"}}, "has no such rows"),
        ({"evaluation": {"keep_best": True}}, "weights of earlier shapes cannot be exported"),
        ({"optimizer": {"method": "frugal"}}, "set optimizer.part to another than tensors"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    questions: Path, section: dict[str, Any], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        Recipe(**(values(questions) | section))

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modicum.core.contracts.catalog import find
from modicum.core.contracts.ledger import ModelQuery
from modicum.core.errors import InputError
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.ranks.ranks import Ranks
from modicum.data.sequences import SequenceBatch, delayed_recall
from modicum.models.recurrent import RecurrentConfig, create, load
from modicum.recipe import Recipe
from modicum.tasks.sequences import SequenceClasses, SequenceTask

RECIPE = Recipe(training={"batch_size": 6, "seed": 3})


def task(**fields: object) -> SequenceTask:
    made = {} if fields.get("data") == "digits" else {"sequences": 64}
    return SequenceClasses(**{**made, "held_out": 16, "width": 9, **fields}).bind(None)


def test_the_net_is_the_recurrence_by_hand() -> None:
    model = create(RecurrentConfig(3, 5, 4), seed=0).double()
    inputs = torch.randn(6, 7, 3, dtype=torch.float64)
    last = torch.tensor([6, 0, 3, 6, 1, 5])
    cell, found = model.blocks[0], model(inputs, last)
    for row in range(6):
        state = torch.zeros(5, dtype=torch.float64)
        for step in range(int(last[row]) + 1):
            drive = cell.input.weight @ inputs[row, step] + cell.input.bias
            state = torch.tanh(drive + cell.recurrent.weight @ state)
        expected = model.head.weight @ state + model.head.bias
        assert torch.allclose(found[row], expected, atol=1e-12)
    model.recompute = True
    (one,) = torch.autograd.grad(model(inputs, last).sum(), cell.recurrent.weight)
    model.recompute = False
    (other,) = torch.autograd.grad(model(inputs, last).sum(), cell.recurrent.weight)
    assert torch.allclose(one, other, atol=1e-12)


def test_new_weights_are_a_function_of_the_seed_and_w_is_orthogonal() -> None:
    one, same, other = (create(RecurrentConfig(3, 32, 4), seed=seed) for seed in (1, 1, 2))
    w = one.blocks[0].recurrent.weight
    assert torch.allclose(w @ w.T, torch.eye(32), atol=1e-5)
    assert torch.equal(w, same.blocks[0].recurrent.weight)
    assert not torch.equal(w, other.blocks[0].recurrent.weight)
    shapes = {name: tuple(p.shape) for name, p in one.named_parameters()}
    assert shapes == one.config.parameter_shapes()


def test_a_scalar_is_held_as_one_row() -> None:
    class WithScalar:
        def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
            return {"weight": (3, 2), "scale": ()}

    assert task().held(WithScalar(), 4) == {"weight": ((3, 8),), "scale": ((1, 4),)}


def test_recall_shows_the_class_first_and_pads_what_is_shorter() -> None:
    data = delayed_recall(200, length=9, classes=3, noise=0.5, seed=2, shortest=4)
    batch = data.batch(range(200))
    assert torch.equal(batch.inputs[:, 0].argmax(1), batch.labels)
    assert set(batch.lengths.tolist()) == set(range(4, 10))
    assert set(batch.labels.tolist()) == {0, 1, 2}
    beyond = torch.arange(9) >= batch.lengths[:, None]
    assert (batch.inputs[beyond] == 0).all()
    noise = batch.inputs[:, 1:][~beyond[:, 1:]]
    assert noise.std() == pytest.approx(0.5, rel=0.05)
    assert data.worst(3).rows == 3
    assert [each.rows for each in data.shapes([2, 5])] == [5, 2]
    assert batch.idle().count == 0
    assert batch.twice().rows == 400
    parts = batch.split(150)
    assert [part.rows for part in parts] == [150, 50]
    assert torch.equal(parts[1].last, batch.lengths[150:] - 1)


def test_what_is_trained_and_what_is_held_out_are_apart(tmp_path: Path) -> None:
    asked = task()
    data = asked.prepare(RECIPE, asked.look(RECIPE), tmp_path, lambda *_: None, Ranks())
    assert data.validation is not None
    assert (len(data.train), len(data.validation)) == (64, 16)
    assert list(tmp_path.iterdir()) == []
    train, held = data.train.batch(range(64)).inputs, data.validation.batch(range(16)).inputs
    assert not any(torch.equal(one, other) for one in train for other in held)
    other = task(noise=0.2)
    again = other.prepare(RECIPE, other.look(RECIPE), tmp_path, lambda *_: None, Ranks())
    assert again.identity != data.identity


def test_digits_come_row_by_row() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    asked = task(data="digits", held_out=97)
    assert asked.look(RECIPE).config == RecurrentConfig(8, 9, 10)
    train, held = asked.rows(seed=0)
    assert held is not None
    assert (len(train), len(held)) == (1700, 97)
    batch, known = train.batch([5]), datasets.load_digits()
    scan = (batch.inputs[0] + 1) * 8
    places = [
        n for n, image in enumerate(known.images) if torch.equal(scan, torch.tensor(image).float())
    ]
    assert batch.labels.item() in {int(known.target[place]) for place in places}


def test_a_model_comes_back_from_a_folder(tmp_path: Path) -> None:
    first = task()
    model = create(first.look(RECIPE).config, seed=5)
    data = first.prepare(RECIPE, first.look(RECIPE), tmp_path, lambda *_: None, Ranks())
    first.export(model, data, tmp_path / "run" / "model")
    again = task(path=str(tmp_path / "run"), width=4)
    inputs = again.look(RECIPE)
    assert inputs.config.width == 9
    with on_meta():
        fresh = again.model(again.config(inputs, data))
    materialise(fresh, "cpu")
    again.fill(fresh, inputs)
    batch = data.train.batch(range(5))
    expected = first.outputs(model, batch)
    assert torch.equal(again.outputs(fresh, batch), expected)
    assert torch.equal(first.outputs(load(tmp_path / "run" / "model"), batch), expected)
    with pytest.raises(InputError, match="4 classes of sequences of 4 channels, and recall has 3"):
        task(path=str(tmp_path / "run"), classes=3).look(RECIPE)


def test_sums_and_metrics() -> None:
    asked = task()
    batch = asked.rows(0)[0].batch(range(12))
    model = create(asked.look(RECIPE).config, seed=0)
    sums = asked.evaluate(model, batch)
    with torch.no_grad():
        logits = asked.outputs(model, batch)
    assert sums["accuracy"] == float((logits.argmax(1) == batch.labels).sum())
    assert asked.measures(sums, 12)["accuracy"] == sums["accuracy"] / 12
    assert (
        float(
            asked.loss_of(
                logits, SequenceBatch(batch.inputs, batch.lengths, batch.labels * 0 - 100)
            )
        )
        == 0
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"data": "digits", "length": 5}, "task.length"),
        ({"data": "digits", "held_out": 1797}, "task.held_out"),
        ({"shortest": 13}, "task.shortest"),
        ({"shortest": 1}, "task.shortest"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as error:
        task(**fields).look(RECIPE)
    assert error.value.field == field


def test_the_catalog_knows_it_and_gives_an_example() -> None:
    assert find("sequences", room="tasks").load() is SequenceClasses
    asked = task()
    batch = asked.example(asked.look(RECIPE).config, ModelQuery(3, 12))
    assert (tuple(batch.inputs.shape), batch.count) == ((3, 12, 4), 3)
    assert asked.row(RECIPE) == ModelQuery(1, 12)

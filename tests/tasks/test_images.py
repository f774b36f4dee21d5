from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from modicum.core.contracts.catalog import find
from modicum.core.contracts.ledger import ModelQuery
from modicum.core.errors import InputError
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.layers.saved_tensors import Shares
from modicum.core.ranks.ranks import Ranks
from modicum.data.images import ImageBatch
from modicum.models.convnet import ConvNetConfig, create, load
from modicum.recipe import Recipe
from modicum.tasks.images import ImageClasses, ImageTask

RECIPE = Recipe(training={"batch_size": 6, "seed": 3})


def task(**fields: object) -> ImageTask:
    return ImageClasses(**{"images": 64, "held_out": 16, "widths": (4, 6), **fields}).bind(None)


def test_the_catalog_knows_it_as_a_task() -> None:
    record = find("images", room="tasks")
    assert record.load() is ImageClasses
    assert record.fields["widths"][1] == (32, 32, 64, 64, 128, 128)


def test_what_is_looked_at() -> None:
    inputs = task().look(RECIPE)
    assert inputs.config == ConvNetConfig(10, 3, 32, (4, 6))
    assert inputs.model_folder is None
    assert inputs.described == "80 textures of 32x32 pixels"
    digits = task(data="digits", norm="group", widths=(4, 8)).look(RECIPE)
    assert digits.config == ConvNetConfig(10, 1, 32, (4, 8), norm="group")
    with pytest.raises(InputError, match="must divide every width") as error:
        task(norm="group").look(RECIPE)
    assert error.value.field == "task.groups"


def test_a_model_goes_on_from_a_folder(tmp_path: Path) -> None:
    first = task()
    model = create(first.look(RECIPE).config, seed=5)
    data = first.prepare(RECIPE, first.look(RECIPE), tmp_path, lambda *_: None, Ranks())
    first.export(model, data, tmp_path / "run" / "model")
    again = task(path=str(tmp_path / "run"), widths=(9,))
    inputs = again.look(RECIPE)
    assert inputs.config.widths == (4, 6)
    with on_meta():
        fresh = again.model(again.config(inputs, data))
    materialise(fresh, "cpu")
    again.fill(fresh, inputs)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(fresh(x), model(x))
    assert torch.equal(load(tmp_path / "run" / "model")(x), model(x))
    with pytest.raises(InputError, match=r"10 classes of images of 3x32x32, and textures have 4"):
        task(path=str(tmp_path / "run"), classes=4).look(RECIPE)


def test_data_are_a_function_of_the_recipe(tmp_path: Path) -> None:
    asked = task()
    data = asked.prepare(RECIPE, asked.look(RECIPE), tmp_path, lambda *_: None, Ranks())
    assert data.validation is not None
    assert (len(data.train), len(data.validation)) == (64, 16)
    assert len(data.sampler.indices(0)) == 6
    assert list(tmp_path.iterdir()) == []
    assert data.identity["seed"] == 3
    other = task(images=65)
    more = other.prepare(RECIPE, other.look(RECIPE), tmp_path, lambda *_: None, Ranks())
    assert more.identity != data.identity
    held = data.validation.batch([0]).images
    assert all(not torch.equal(held[0], image) for image in data.train.batch(range(64)).images)
    none = task(held_out=0)
    assert none.rows(seed=0)[1] is None
    assert data.test is None
    assert data.identity["images"].keys() == {"data", "classes", "images", "held_out"}


def test_another_number_to_evaluate_on_leaves_the_test_as_it_is() -> None:
    train, held, test = task(tested=8).rows(seed=0)
    again = task(tested=8, held_out=5).rows(seed=0)[2]
    assert held is not None
    assert test is not None
    assert again is not None
    images = test.batch(range(8)).images
    assert torch.equal(images, again.batch(range(8)).images)
    for other in (train, held):
        for image in other.batch(range(len(other))).images:
            assert not any(torch.equal(image, each) for each in images)


def test_losses_are_sums_over_trained_labels() -> None:
    asked = task()
    model = create(asked.look(RECIPE).config, seed=0)
    batch = asked.rows(seed=0)[0].batch(range(5))
    total = asked.loss_sum(model, batch)
    expected = F.cross_entropy(model(batch.images), batch.labels) * 5
    torch.testing.assert_close(total, expected)
    parts = sum(asked.loss_sum(model, part) for part in batch.split(2))
    torch.testing.assert_close(parts, total)
    assert float(asked.loss_sum(model, batch.idle()).detach()) == 0.0
    some = ImageBatch(batch.images, batch.labels.clone().index_fill_(0, torch.tensor([1]), -100))
    sums = asked.evaluate(model, some)
    assert set(asked.measures(sums, 4)) == {*asked.metrics, "by_class"}
    right = (model(batch.images).argmax(1) == some.labels).sum()
    assert sums["accuracy"] == float(right)
    assert sums["loss"] == pytest.approx(float(asked.loss_sum(model, some).detach()))
    assert sums["loss"] / 4 == pytest.approx(math.log(10), rel=0.5)


def test_ledger_row_and_trial() -> None:
    asked = task()
    config = asked.look(RECIPE).config
    shape = ModelQuery(6, 1)
    assert asked.row(RECIPE) == ModelQuery(1, 1)
    plain = asked.ledger(config, shape)
    less = asked.ledger(config, shape, shares=Shares(0.1, 0.03))
    assert less.bytes("activation", "loss") < plain.bytes("activation", "loss")
    assert asked.largest_bytes(config, shape) == 6 * 6 * 32 * 32 * 4
    assert asked.ledger(config, shape, adapted=object()) is None  # it is traced
    batch = asked.rows(seed=0)[0].worst(3)
    trial = asked.trial(config, batch)
    assert trial.config.widths == (4,)
    assert asked.loss_sum(create(trial.config, 0), trial.batch).isfinite()

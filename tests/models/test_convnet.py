from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modicum.core.errors import InputError
from modicum.core.layers.meta import on_meta
from modicum.models.convnet import ConvNet, ConvNetConfig, create, load, read_config, save

SMALL = ConvNetConfig(classes=5, channels=1, size=16, widths=(4, 8, 12), norm="group")


def test_it_is_convolutions_norms_relus_pooling_and_a_mean() -> None:
    model = create(SMALL, seed=0)
    x = torch.randn(2, 1, 16, 16)
    expected = x
    for block, pools in zip(model.blocks, (False, True, False), strict=True):
        expected = F.relu(block.norm(block.conv(expected)))
        expected = F.max_pool2d(expected, 2) if pools else expected
    expected = expected.mean((2, 3)) @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(x), expected)
    assert [block.norm for block in create(ConvNetConfig(widths=(4,)), 0).blocks] == [None]


def test_names_and_shapes_are_those_of_the_configuration() -> None:
    for config in (SMALL, ConvNetConfig()):
        with on_meta():
            model = ConvNet(config)
        found = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert found == config.parameter_shapes()
        assert sum(p.numel() for p in model.parameters()) == config.parameter_count()
        prefixes = config.block_prefixes()
        inside = [n for n in found if any(n.startswith(prefix) for prefix in prefixes)]
        assert len(prefixes) == len(list(model.blocks))
        assert set(found) - set(inside) == {"head.weight", "head.bias"}


def test_initial_values_depend_on_the_seed_and_the_name() -> None:
    one, same, other = create(SMALL, 1), create(SMALL, 1), create(SMALL, 2)
    drawn = ("conv.weight", "head.weight")
    weights = [name for name in SMALL.parameter_shapes() if name.endswith(drawn)]
    for name, value in one.named_parameters():
        assert torch.equal(value, same.get_parameter(name))
        assert torch.equal(value, other.get_parameter(name)) == (name not in weights)
    assert all(bool((block.norm.weight == 1).all()) for block in one.blocks)
    wide = create(ConvNetConfig(widths=(64, 64)), 0).blocks[1].conv.weight.detach()
    assert float(wide.std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)


def test_a_model_on_meta_is_not_initialised() -> None:
    with on_meta():
        model = ConvNet(SMALL)
    with pytest.raises(ValueError, match="no memory yet"):
        model.initialise(0)


def test_recomputed_gradients_are_the_same() -> None:
    model, x = create(SMALL, 0), torch.randn(2, 1, 16, 16)
    found = []
    for recompute in (False, True):
        model.recompute = recompute
        found.append(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))
    assert all(map(torch.equal, *found))


def test_a_saved_model_is_the_same_again(tmp_path: Path) -> None:
    model, x = create(SMALL, 3), torch.randn(2, 1, 16, 16)
    save(model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.config == SMALL
    assert torch.equal(again(x), model(x))
    assert save(model, tmp_path / "other", write=False) == tmp_path / "other"
    assert not (tmp_path / "other").exists()


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    folder = save(create(SMALL, 0), tmp_path / "model")
    with pytest.raises(InputError, match=r"config\.json: cannot be read"):
        read_config(tmp_path)
    raw = json.loads((folder / "config.json").read_text())

    def rewritten(**fields: object) -> None:
        (folder / "config.json").write_text(json.dumps(raw | fields))

    for fields, said in (
        ({"model_type": "llama"}, "another kind of model"),
        ({"widths": 4}, "no configuration"),
        ({"surprise": 4}, "no configuration"),
        ({"size": 17}, "is halved 1 times"),
        ({"widths": [4, 8, 16]}, r"weights are not those.*blocks\.2\.conv\.weight|blocks\.2"),
        ({"norm": "none"}, r"weights are not those"),
    ):
        rewritten(**fields)
        with pytest.raises(InputError, match=said) as error:
            load(folder)
        assert str(folder) in str(error.value.file)
    (folder / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config\.json: this holds no JSON object"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"widths": ()}, "widths"),
        ({"widths": (4, 0)}, "widths"),
        ({"size": 12, "widths": (4,) * 6}, "size"),
        ({"norm": "batch"}, "norm"),
        ({"norm": "group", "widths": (4, 6)}, "groups"),
        ({"pool_every": 0}, "pool_every"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as error:
        ConvNetConfig(**fields)
    assert error.value.field == field


def test_blocks_are_modules_of_their_own() -> None:
    model = create(SMALL, 0)
    assert isinstance(model.blocks, nn.ModuleList)
    images = torch.randn(1, 1, 16, 16)
    x = images
    for block in model.blocks:
        x = block(x)
    assert torch.equal(model.head(x.mean((2, 3))), model(images))

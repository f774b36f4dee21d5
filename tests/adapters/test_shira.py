"""What SHiRA promises exactly: its masks, their sizes and ranks, its files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modicum.adapters import LoRA, SHiRA, load
from modicum.adapters.native_files import WEIGHTS
from modicum.adapters.preparation import Preparation
from modicum.adapters.shira import Drawn, SHiRALayer, largest
from modicum.core.errors import InputError
from modicum.proofs import run_battery
from modicum.proofs.contracts.adapters.subjects import numbers, stir


def linear(outputs: int = 7, inputs: int = 9) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(inputs, outputs))
    for name, parameter in model.named_parameters():
        parameter.data = numbers(*parameter.shape, name=name)
    return model


def layer_of(value: SHiRA, model: nn.Module, *, seed: int = 0, **given: object) -> SHiRALayer:
    [(_, layer)] = value.attach(model, seed=seed, **given).layers()  # type: ignore[arg-type]
    assert isinstance(layer, SHiRALayer)
    return layer


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


@pytest.mark.parametrize("mask", ["rand", "magnitude", "gradient", "snip", "struct"])
def test_a_mask_has_as_many_entries_as_a_lora_and_each_once(mask: str) -> None:
    model, batches = linear(), [numbers(16, 9)]
    lora = sum(p.numel() for p in LoRA(rank=2).attach(linear()).parameters())
    layer = layer_of(SHiRA(rank=2, mask=mask), model, batches=batches, loss=loss)
    assert layer.values.numel() == len(layer.indices.unique()) == lora == 2 * 16
    assert bool((layer.indices.diff() > 0).all())


def test_masks_that_look_at_weights_and_gradients_take_the_largest() -> None:
    batches = [numbers(16, 9), numbers(4, 9, name="more")]
    model = linear()
    total = sum(loss(model, batch) for batch in batches)
    (gradient,) = torch.autograd.grad(total, [model[0].weight])
    weight = model[0].weight.detach()
    scores = {"magnitude": weight, "gradient": gradient, "snip": weight * gradient}
    for mask, score in scores.items():
        layer = layer_of(SHiRA(rank=2, mask=mask), linear(), batches=batches, loss=loss)
        expected = score.abs().flatten().argsort(descending=True)[:32].sort().values
        assert torch.equal(layer.indices.long(), expected), mask


def test_of_equal_entries_the_first_are_taken() -> None:
    assert largest(torch.ones(2, 3), 4, "layer").tolist() == [0, 1, 2, 3]
    with pytest.raises(InputError, match="not finite"):
        largest(torch.tensor([[1.0, torch.nan]]), 1, "layer")


def test_a_random_mask_is_of_seed_and_name_and_of_high_rank() -> None:
    count = 8 * 2 * 256
    mask = torch.zeros(256 * 256)
    draw = Drawn(256, 256, count, spaced=False)
    mask[draw(0, "layer").long()] = numbers(count, name="values")
    assert int(torch.linalg.matrix_rank(mask.view(256, 256))) == 256
    one, same, other = (layer_of(SHiRA(rank=2), linear(), seed=s).indices for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_structured_mask_is_the_diagonal_and_rows_at_equal_distances() -> None:
    mask = torch.zeros(8 * 8)
    mask[Drawn(8, 8, 8 + 7 + 7 + 3, spaced=True)(0, "").long()] = 1
    assert bool((mask.view(8, 8).diagonal() == 1).all())
    rows = mask.view(8, 8).sum(1)
    first = next(n for n in range(8) if rows[n] == 8 and rows[(n + 5) % 8] == 4)
    assert rows.roll(-first).tolist() == [8, 1, 8, 1, 1, 4, 1, 1]
    full = Drawn(5, 13, 65, spaced=True)(3, "other")
    assert torch.equal(full, torch.arange(65, dtype=torch.int32))
    for rows_, columns, count in ((13, 5, 18), (13, 5, 40), (5, 13, 36), (9, 7, 16), (7, 9, 62)):
        found = Drawn(rows_, columns, count, spaced=True)(1, "layer")
        assert len(found.unique()) == count


@pytest.mark.parametrize("mask", ["rand", "magnitude"])
def test_a_file_has_the_values_and_what_says_where_they_are(mask: str, tmp_path: Path) -> None:
    model = linear()
    adapter = stir(SHiRA(rank=2, mask=mask).attach(model, seed=5))
    adapter.save(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / WEIGHTS)
    kept = {"0.values": 32 * 4} | ({"0.seed": 8} if mask == "rand" else {"0.indices": 32 * 4})
    assert {name: tensor.nbytes for name, tensor in stored.items()} == kept
    other = linear()
    load(other, tmp_path / "adapter", name="other")
    assert torch.equal(other(numbers(3, 9)), model(numbers(3, 9)))


@pytest.mark.parametrize("wrong", ["twice", "unsorted", "outside", "negative"])
def test_wrong_indices_of_a_file_are_refused(wrong: str, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    adapter = stir(SHiRA(rank=2, mask="magnitude").attach(linear()))
    adapter.save(folder)
    stored = load_file(folder / WEIGHTS)
    indices = stored["0.indices"]
    changed = {
        "twice": indices.clamp(max=int(indices[-2])),
        "unsorted": indices.flip(0).contiguous(),
        "outside": torch.cat([indices[:-1], torch.tensor([63], dtype=torch.int32)]),
        "negative": torch.cat([torch.tensor([-1], dtype=torch.int32), indices[1:]]),
    }
    save_file(stored | {"0.indices": changed[wrong]}, folder / WEIGHTS)
    model = linear()
    before = [name for name, _ in model.named_modules()]
    with pytest.raises(InputError, match=r"outside of the weight|must be ascending"):
        load(model, folder)
    assert [name for name, _ in model.named_modules()] == before
    state = adapter.model.state_dict()
    key = next(name for name in state if name.endswith(".indices"))
    with pytest.raises(RuntimeError, match=r"outside of the weight|must be ascending"):
        adapter.model.load_state_dict(state | {key: changed[wrong]})
    assert torch.equal(state[key], indices)


def test_more_entries_than_a_weight_has_are_refused() -> None:
    SHiRA(rank=3).attach(linear())
    with pytest.raises(InputError, match=r"63 entries, and 4 asks for 64 of them; at most 3"):
        SHiRA(rank=4).attach(linear())
    with pytest.raises(InputError, match="embedding"):
        SHiRA(rank=1, targets=("0",)).attach(nn.Sequential(nn.Embedding(9, 9)))


def test_what_data_chose_is_kept(tmp_path: Path) -> None:
    value, model = SHiRA(rank=2, mask="snip"), linear()
    adapter = value.attach(model, batches=[numbers(16, 9)], loss=loss)
    adapter.prepared.save(tmp_path / "prepared")
    again = layer_of(value, linear(), prepared=Preparation.load(tmp_path / "prepared"))
    [(_, layer)] = adapter.layers()
    assert torch.equal(again.indices, layer.get_buffer("indices"))


@pytest.mark.parametrize("mask", ["magnitude", "struct", "snip"])
def test_other_masks_pass_the_battery(mask: str) -> None:
    results = run_battery(SHiRA(rank=2, mask=mask), cheap_only=True)
    assert [(result.name, result.message) for result in results if not result.passed] == []

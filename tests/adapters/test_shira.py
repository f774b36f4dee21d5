"""What SHiRA promises exactly: its masks, their sizes and ranks, its files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modicum.adapters import LoRA, SHiRA, load
from modicum.adapters.native_files import WEIGHTS
from modicum.adapters.peft_formats import read
from modicum.adapters.preparation import Preparation
from modicum.adapters.shira import Drawn, SHiRALayer, largest
from modicum.adapters.starting import fields_of, start_from
from modicum.core.errors import InputError
from modicum.proofs import run_battery
from modicum.proofs.contracts.adapters.subjects import llama, numbers, stir, tokens
from modicum.proofs.contracts.transformers_loop import hugging_face_llama


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
    adapter.save(tmp_path / "adapter", form="modicum")
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
    adapter.save(folder, form="modicum")
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


def of_peft(folder: Path, **fields: Any) -> Any:
    """A model with PEFT's SHiRA on it, as after training, saved to a folder."""
    peft = pytest.importorskip("peft")
    config = peft.ShiraConfig(r=2, target_modules=["q_proj", "down_proj"], random_seed=1, **fields)
    adapted = peft.get_peft_model(hugging_face_llama(), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * numbers(*parameter.shape, name=name))
    adapted.save_pretrained(folder)
    return adapted


def trained(model: nn.Module) -> list[float]:
    """Twenty losses of what is trained of a model."""
    ids = tokens(4)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(
            model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore")
def test_a_file_of_peft_computes_and_trains_as_it_does_there_and_goes_back(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    theirs, plain, ids = of_peft(tmp_path / "theirs"), hugging_face_llama(), tokens()
    ours = load(plain, tmp_path / "theirs", train=True)
    assert (ours.method.mask, ours.method.rank) == ("stored", 2)
    expected = theirs(ids).logits
    torch.testing.assert_close(plain(ids).logits, expected, rtol=1e-5, atol=1e-5)
    for model in (plain, theirs):
        model(ids).logits.square().mean().backward()
    for name, layer in ours.layers():
        gradient = layer.get_parameter("values").grad
        wanted = theirs.get_submodule(f"base_model.model.{name}").shira_weight["default"].grad
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)
    ours.save(tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(hugging_face_llama(), tmp_path / "ours")
    torch.testing.assert_close(again(ids).logits, expected, rtol=1e-5, atol=1e-5)
    ours.save(tmp_path / "own", form="modicum")
    kept = hugging_face_llama()
    load(kept, tmp_path / "own")
    assert torch.equal(kept(ids).logits, plain(ids).logits)
    for model in (plain, theirs):
        model.zero_grad()
    losses = trained(theirs)
    assert trained(plain) == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < losses[0] - 0.02


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mask", ["rand", "magnitude", "struct", "snip"])
def test_every_mask_is_read_by_peft(mask: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, ids = hugging_face_llama(), tokens()
    value = SHiRA(rank=2, mask=mask, targets=("up_proj",))
    data: dict[str, Any] = {
        "batches": [ids],
        "loss": lambda m, batch: m(batch).logits.square().sum(),
    }
    adapter = stir(value.attach(model, **data if mask == "snip" else {}), 0.05)
    adapter.save(tmp_path)
    theirs = peft.PeftModel.from_pretrained(hugging_face_llama(), tmp_path)
    torch.testing.assert_close(theirs(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_training_starts_from_a_file_of_peft(tmp_path: Path) -> None:
    source = stir(SHiRA(rank=2, mask="magnitude").attach(llama()))
    source.save(tmp_path)
    stored = read(tmp_path, llama())
    fields = fields_of(stored, llama("meta"), SHiRA(), {})
    assert (fields["mask"], fields["rank"]) == ("stored", 2)
    with pytest.raises(InputError, match="has another; leave it out"):
        fields_of(stored, llama("meta"), SHiRA(), {"mask": "rand"})
    model = llama("meta")
    adapter = SHiRA(**fields).attach(model)
    model.to_empty(device="cpu").initialise(0)
    start_from(adapter, stored)
    assert torch.equal(model(tokens()), source.model(tokens()))


def test_what_only_a_file_gives_and_where_peft_has_no_shira_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="takes frozen tensors from a file"):
        SHiRA(rank=2, mask="stored").attach(linear())
    pytorch = pytest.importorskip("transformers.pytorch_utils")
    adapter = SHiRA(rank=2).attach(nn.Sequential(pytorch.Conv1D(7, 9)))
    with pytest.raises(InputError, match=r"SHiRA on nn.Linear alone, and 0 is none; use form="):
        adapter.save(tmp_path, form="peft")
    with pytest.raises(InputError, match="copies of base parameters are trained in addition"):
        SHiRA(rank=2, also=("0.bias",)).attach(linear()).save(tmp_path, form="peft")


@pytest.mark.filterwarnings("ignore")
def test_files_of_peft_that_say_something_else_are_refused(tmp_path: Path) -> None:
    of_peft(tmp_path)
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    whole, said = load_file(weights), json.loads(config.read_text())
    key = next(name for name in whole if name.endswith("q_proj.shira_indices"))
    places, values = whole[key], key.replace("indices", "weight")
    shifted = places.clone()
    shifted[1, 0] = 16  # of a weight of 16 columns: the first place of the next row
    other = {key.replace("q_proj", "k_proj"): places.clone()}
    cases: list[tuple[dict[str, Tensor], dict[str, Any], str]] = [
        (whole | {key: places[:, [0, 0, *range(2, places.shape[1])]]}, {}, "no index twice"),
        (whole | {key: places.flip(1)}, {}, "must be ascending"),
        (whole | {key: shifted}, {}, "outside of the weight, which has places 0 to 15"),
        (whole | {key: places - 1}, {}, "outside of the weight"),
        (whole | {key: places.float() + 0.5}, {}, "are no integers"),
        (whole | {key: places.float() * torch.nan}, {}, "are no integers"),
        (whole | {key: places[0]}, {}, "no rows and columns"),
        (whole | {key: places[:, :-1]}, {}, "does not fit the model"),
        ({name: tensor for name, tensor in whole.items() if name != key}, {}, "lacks the indices"),
        ({name: tensor for name, tensor in whole.items() if name != values}, {}, "lacks a factor"),
        (whole | other, {}, "leaves out the layer"),
        (whole | {"base_model.model.lm_head.weight": places.clone()}, {}, "for another model"),
        (whole, {"r": 3}, "does not fit the model"),
        (whole, {"r": True}, "must be an integer above zero"),
        (whole, {"modules_to_save": ["lm_head"]}, "trains more than SHiRA does"),
        (whole, {"target_modules": "all-linear", "init_weights": False}, "would be random"),
        (whole, {"target_modules": ["q_proj"]}, "leaves out the layer"),
    ]
    for tensors, changes, problem in cases:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights)
        config.write_text(json.dumps(said | changes))
        model = hugging_face_llama()
        before = [type(module) for module in model.modules()]
        with pytest.raises(InputError, match=problem):
            load(model, tmp_path)
        assert [type(module) for module in model.modules()] == before
    # As PEFT writes them on Windows.
    save_file(whole | {key: places.float()}, weights)
    config.write_text(json.dumps(said))
    load(hugging_face_llama(), tmp_path)

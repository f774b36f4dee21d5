"""QA-HiRA: what its matrix means, and that merging into tiles leaves codes and scales alone."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from torch import Tensor, nn

from modicum.adapters import LoRA, QAHiRA, load
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.merging import RoundingWarning
from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import full_weight
from modicum.core.layers.meta import on_meta
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.linears import NF4Linear, TileLinear
from modicum.proofs.bench.meters import saved_bytes
from modicum.proofs.contracts.adapters.subjects import distance, numbers, stir

BITS = (2, 3, 4)


def base(bits: int = 2, zero_points: str = "fp32", **tile: Any) -> nn.Sequential:
    """Two layers in tiles that are short at the edges, one with a bias."""
    asked = {"bits": bits, "zero_points": zero_points, **tile}
    wide = TileLinear.from_dense(numbers(29, 18, name="wide"), numbers(29, name="bias"), **asked)
    narrow = TileLinear.from_dense(numbers(11, 29, name="narrow"), None, **asked)
    return nn.Sequential(wide, nn.Tanh(), narrow)


def stirred(model: nn.Module, **fields: Any) -> AttachedAdapter:
    return stir(QAHiRA(**fields).attach(model), std=0.5)


def digests(model: nn.Module, *leaves: str) -> dict[str, str]:
    """Of the bytes of the parameters with these last names."""
    return {
        name: hashlib.sha256(bytes(parameter.flatten().tolist())).hexdigest()
        for name, parameter in model.named_parameters()
        if name.rsplit(".", 1)[-1] in leaves
    }


@pytest.mark.parametrize("bits", BITS)
def test_a_merge_leaves_codes_and_scales_and_is_undone_to_the_bit(bits: int) -> None:
    model, x = base(bits), numbers(6, 18)
    before = model(x)
    adapter = stirred(model)
    unmerged = model(x)
    assert distance(unmerged, before) > 0.1
    held, zeros = digests(model, "codes", "scales"), digests(model, "zeros")
    assert len(held) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundingWarning)
        adapter.merge()
    assert digests(model, "codes", "scales") == held
    merged = digests(model, "zeros")
    assert not set(merged.values()) & set(zeros.values())
    assert distance(model(x), unmerged) < 1e-5
    adapter.unmerge()
    assert digests(model, "codes", "scales", "zeros") == held | zeros
    assert torch.equal(model(x), unmerged)
    assert model[0].bias is not None
    adapter.merge(dense=torch.bfloat16)  # nothing is lost, so nothing becomes dense
    assert digests(model, "zeros") == merged
    adapter.detach()
    assert all(type(layer) is not nn.Linear for layer in model)
    assert distance(model(x), unmerged) < 1e-5


@pytest.mark.parametrize(("zero_points", "bound"), [("fp16", 4.9e-4), ("bf16", 4e-3)])
def test_short_zero_points_round_as_is_said_and_say_so(zero_points: str, bound: float) -> None:
    model = base(zero_points=zero_points)
    adapter = stirred(model)
    layer, change = model[0], next(adapter.layers())[1].delta()
    wanted = layer.zero_points.float() + change[::8, ::4]
    with pytest.warns(RoundingWarning, match="rounded to a low precision"):
        adapter.merge()
    assert ((layer.zero_points.float() - wanted).abs() <= bound * wanted.abs()).all()


@given(
    outs=st.integers(1, 20),
    ins=st.integers(1, 20),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    scale=st.sampled_from((0.25, 1.0, 3.0)),
)
def test_it_is_one_number_a_tile_whose_gradient_is_the_tile_s_sum(
    outs: int, ins: int, rows: int, columns: int, scale: float
) -> None:
    weight = numbers(outs, ins, name="weight")
    model = nn.Sequential(nn.Linear(ins, outs, bias=False))
    model[0].weight.data.copy_(weight)
    fields = {"tile_rows": rows, "tile_columns": columns, "scale": scale}
    adapter = stirred(model, **fields)
    [(_, layer)] = adapter.layers()
    m = layer.M.detach()
    assert m.numel() == -(-outs // rows) * -(-ins // columns)
    by_hand = torch.empty(outs, ins)
    for i in range(outs):
        for j in range(ins):
            by_hand[i, j] = scale / columns * m[i // rows, j // columns]
    assert torch.allclose(layer.delta(), by_hand, atol=1e-6)
    x, out = numbers(5, ins), numbers(5, outs, name="out")
    assert torch.allclose(model(x), x @ (weight + by_hand).T, atol=1e-4)
    (model(x) * out).sum().backward()
    dense = out.T @ x
    expected = torch.zeros_like(m)
    for i in range(outs):
        for j in range(ins):
            expected[i // rows, j // columns] += scale / columns * dense[i, j]
    assert torch.allclose(layer.M.grad, expected, rtol=1e-4, atol=1e-4)


def test_its_rank_is_that_of_the_matrix() -> None:
    model = nn.Sequential(nn.Linear(64, 48))
    [(_, layer)] = stirred(model).layers()
    rank = int(torch.linalg.matrix_rank(layer.delta().detach(), rtol=1e-5))
    assert rank == int(torch.linalg.matrix_rank(layer.M.detach())) == 48 // 8


def test_it_has_as_many_numbers_as_tiles() -> None:
    value = QAHiRA()
    [site] = value.sites(nn.Sequential(nn.Linear(4096, 4096, bias=False, device="meta")))
    assert value.trained(site) == 4096 * 4096 // 32 == LoRA(rank=64).trained(site)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("coded", [False, True])
def test_layers_that_read_one_tensor_keep_its_sums_once(dropout: float, coded: bool) -> None:
    model = nn.ModuleList(nn.Linear(32, 16, bias=False) for _ in range(3))
    if coded:
        made = [TileLinear.from_dense(layer.weight.detach()) for layer in model]
        model = nn.ModuleList(made)
    stirred(model, dropout=dropout)
    x = numbers(5, 32).requires_grad_() * 1
    with saved_bytes(model.parameters()) as saved:
        outputs = [layer(x) for layer in model]
    sums, masks = 5 * 8 * 4, 3 * 5 * 32 // 8
    assert saved.total == (x.nbytes + masks if dropout else sums)
    assert all(output.requires_grad for output in outputs)


@pytest.mark.parametrize("tile", [(4, 4), (8, 2), (12, 4), (8, 6)])
def test_tiles_that_its_own_go_through_are_refused_and_the_model_is_untouched(
    tile: tuple[int, int],
) -> None:
    model, x = base(), numbers(6, 18)
    before, names = model(x), [name for name, _ in model.named_modules()]
    rows, columns = tile
    said = rf"tiles of {rows} x {columns} do not consist of tiles of its base, which are 8 x 4"
    with pytest.raises(InputError, match=said):
        QAHiRA(tile_rows=rows, tile_columns=columns).attach(model)
    assert [name for name, _ in model.named_modules()] == names
    assert torch.equal(model(x), before)
    assert model[0].bias.requires_grad


def test_a_model_without_memory_refuses_them_too() -> None:
    with on_meta():
        model = nn.Sequential(TileLinear(16, 16))
    with pytest.raises(InputError, match="tiles of 2 x 2 do not consist of tiles of its base"):
        QAHiRA(tile_rows=2, tile_columns=2).attach(model)
    assert sum(p.numel() for p in QAHiRA().attach(model).parameters()) == 16 * 16 // 32


def test_multiples_of_the_base_s_tiles_merge_as_well() -> None:
    model, x = base(tile_rows=4, tile_columns=2), numbers(6, 18)
    adapter = stirred(model, tile_rows=8, tile_columns=6)
    unmerged, held = model(x), digests(model, "codes", "scales")
    adapter.merge()
    assert digests(model, "codes", "scales") == held
    assert distance(model(x), unmerged) < 1e-5


def test_a_base_without_zero_points_keeps_it_unmerged() -> None:
    model, x = nn.Sequential(NF4Linear.from_dense(numbers(16, 16, name="weight"))), numbers(6, 16)
    adapter = stirred(model)
    unmerged = model(x)
    with pytest.raises(InputError, match=r"cannot be kept as nf4 .*one in tiles of 8 x 4 could"):
        adapter.merge()
    assert torch.equal(model(x), unmerged)
    adapter.merge(dense=torch.float32)
    assert distance(model(x), unmerged) < 1e-5
    adapter.unmerge()
    assert torch.equal(model(x), unmerged)


def test_other_adapters_do_not_merge_into_tiles() -> None:
    model, x = base(), numbers(6, 18)
    adapter = stir(LoRA(rank=2).attach(model))
    unmerged, held = model(x), digests(model, "codes", "scales", "zeros")
    with pytest.raises(InputError, match=r"cannot be kept as tiles without losing a part"):
        adapter.merge()
    assert digests(model, "codes", "scales", "zeros") == held
    adapter.merge(dense=torch.float32)
    assert distance(model(x), unmerged) < 1e-5
    adapter.unmerge()
    assert torch.equal(model(x), unmerged)


def test_one_that_merged_may_have_another_next_to_it() -> None:
    model, x = base(), numbers(6, 18)
    first = stirred(model)
    second = stir(LoRA(rank=2).attach(model, name="second"))
    first.activate(alone=False)
    both = model(x)
    first.merge()
    assert distance(model(x), both) < 1e-5
    second.detach()
    first.unmerge()
    assert first.active


def test_embeddings_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8))
    with pytest.raises(InputError, match=r"targets: .*no mean makes sense"):
        QAHiRA(targets=("0",)).attach(model)


def test_kept_in_files_it_merges_into_another_copy_of_the_base(tmp_path: Path) -> None:
    model, other, x = base(), base(), numbers(6, 18)
    stirred(model).save(tmp_path)
    twin = load(other, tmp_path)
    assert torch.equal(other(x), model(x))
    twin.merge()
    assert distance(other(x), model(x)) < 1e-5


@pytest.mark.parametrize("bits", BITS)
def test_the_merged_weight_in_fp32_is_coded_to_itself(bits: int) -> None:
    model = base(bits, zero_points="fp16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoundingWarning)
        stirred(model).merge()
    for layer in (model[0], model[2]):
        made = TileLinear.from_dense(full_weight(layer), bits=bits, zero_points="fp16")
        pairs = zip(made.frozen_tensors(), layer.frozen_tensors(), strict=True)
        assert all(torch.equal(one, kept) for one, kept in pairs)


def merged_over_ranks(ranks: Ranks) -> dict[str, Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = base(3)
    adapter = stirred(model)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    x = numbers(6, 18)
    unmerged = model(x)
    for layer in (model[0], model[2], model):
        layer.reshard()
    adapter.merge()
    merged = model(x)
    held = {n: whole(p.detach()) for n, p in model.named_parameters() if not n.endswith(".M")}
    for layer in (model[0], model[2], model):
        layer.reshard()
    adapter.unmerge()
    return {"unmerged": unmerged, "merged": merged, "again": model(x), **held}


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_merge_their_own_rows_of_tiles(pool: Pool, ranks: int) -> None:
    model, x = base(3), numbers(6, 18)
    adapter = stirred(model)
    unmerged = model(x)
    adapter.merge()
    held = {n: p for n, p in model.named_parameters() if not n.endswith(".M")}
    for result in pool.run(merged_over_ranks, ranks=ranks):
        assert distance(result["unmerged"], unmerged) < 1e-6
        assert distance(result["merged"], unmerged) < 1e-5
        assert torch.equal(result["again"], result["unmerged"])
        for name, parameter in held.items():
            assert torch.equal(result[name], parameter), name

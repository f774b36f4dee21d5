"""Adapters on slices of fused layers: q and v of one weight, in the order of any architecture."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from modicum.adapters import DoRA, Hydra, LoRA, LoRASB, PiSSA, RandLoRA, load
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.slices import _RowsAdded, places
from modicum.adapters.travel import travel_of
from modicum.core.errors import InputError
from modicum.core.layers.map_parts import MappedSlice
from modicum.core.layers.meta import on_meta
from modicum.core.ranks.ranks import Ranks
from modicum.linears import NF4Linear
from modicum.proofs.contracts.adapters.subjects import stir

_TOKENS: dict[str, Any] = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
_SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, **_TOKENS}
_STILL = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 4, **_STILL, **_TOKENS},
    "gpt_neox": {"intermediate_size": 40, **_SIZES},
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_size": 24, **_TOKENS},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, **_SIZES},
    "phi3": {"num_key_value_heads": 2, "intermediate_size": 40, "pad_token_id": 0, **_SIZES},
}
QV = ("q_proj", "v_proj")
IDS = torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(0))


def built(name: str, **changes: Any) -> Any:
    """A tiny decoder of transformers, in evaluation; the same every time."""
    config = transformers.AutoConfig.for_model(name, **(CONFIGS[name] | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


def with_deltas(plain: nn.Module, adapter: AttachedAdapter) -> nn.Module:
    """The plain model in float64, with the adapter's changes in the rows of its slices."""
    dense = copy.deepcopy(plain).double()
    with torch.no_grad():
        for name, layer in adapter.layers():
            rows, delta = adapter.sites[name].rows, layer.delta().double()
            assert rows is not None
            weight = dense.get_submodule(name.rpartition(".")[0]).weight
            stored = weight.T if adapter.sites[name].transposed else weight
            for place, row in zip(rows.places().flatten().tolist(), delta, strict=True):
                stored[place] += row
    return dense


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_a_change_of_its_rows_alone(name: str, tmp_path: Path) -> None:
    plain = built(name)
    model, before = copy.deepcopy(plain), logits(plain)
    adapter = LoRA(rank=3, alpha=4.0, targets=QV).attach(model)
    assert len(adapter.sites) == 4
    assert torch.equal(logits(model), before)
    stir(adapter)
    dense = with_deltas(plain, adapter)
    found = logits(model)
    torch.testing.assert_close(found.double(), logits(dense), rtol=0, atol=1e-5)
    assert (found - before).abs().max() > 1e-2
    adapter.save(tmp_path)
    other = load(copy.deepcopy(plain), tmp_path)
    assert torch.equal(logits(other.model), found)
    assert list(other.sites) == list(adapter.sites)
    held = {n: t.clone() for n, t in model.state_dict().items() if "layers_by" not in n}
    adapter.merge()
    torch.testing.assert_close(logits(model), found, rtol=0, atol=1e-5)
    for key, tensor in dense.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key].double(), tensor, rtol=0, atol=1e-6)
    adapter.unmerge()
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in held.items())
    adapter.detach()
    assert repr(model) == repr(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", ["gpt2", "falcon"])
def test_gradients_are_those_of_the_dense_weights(name: str) -> None:
    model = built(name).double()
    dense = copy.deepcopy(model).requires_grad_(True)
    adapter = LoRA(rank=2, targets=QV).attach(model)
    stir(adapter)
    with_deltas_in = with_deltas(dense, adapter)
    logits(with_deltas_in).square().sum().backward()
    logits(model).square().sum().backward()
    for name_, layer in adapter.layers():
        site = adapter.sites[name_]
        assert site.rows is not None
        gradient = with_deltas_in.get_submodule(name_.rpartition(".")[0]).weight.grad
        gradient = gradient.T if site.transposed else gradient
        rows = gradient[places(site.rows)]
        expected = layer.scale * layer.B.T @ rows
        torch.testing.assert_close(layer.A.grad, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(layer.B.grad, layer.scale * rows @ layer.A.T, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (6, 3), (4, 4)])
@pytest.mark.parametrize("name", ["falcon", "phi3"])
def test_slices_are_those_of_separate_layers(name: str, heads: int, kv_heads: int) -> None:
    kv = "num_kv_heads" if name == "falcon" else "num_key_value_heads"
    plain = built(name, num_attention_heads=heads, hidden_size=8 * heads, **{kv: kv_heads})
    model = copy.deepcopy(plain)
    adapter = stir(LoRA(rank=2, targets=("q", "k", "v")).attach(model))
    widths = {site.suffix: site.out_features for site in adapter.sites.values()}
    assert widths == {"q_proj": 8 * heads, "k_proj": 8 * kv_heads, "v_proj": 8 * kv_heads}
    fused: dict[str, list[int]] = {}
    for site in adapter.sites.values():
        assert site.rows is not None
        fused.setdefault(site.name.rpartition(".")[0], []).extend(places(site.rows).tolist())
    for found in fused.values():
        assert sorted(found) == list(range(8 * (heads + 2 * kv_heads)))
    expected = logits(with_deltas(plain, adapter))
    torch.testing.assert_close(logits(model).double(), expected, rtol=0, atol=1e-5)


@st.composite
def grids(draw: st.DrawFn) -> tuple[MappedSlice, MappedSlice, int]:
    """Two slices that share no place, interleaved by group or not, and how many outputs there are.

    As q, k and v of groups of heads lie in one weight.
    """
    groups, first, second, width = (draw(st.integers(1, 3)) for _ in range(4))
    each = (first + second) * width + draw(st.integers(0, 2))
    one = MappedSlice("weight", 0, 0, (groups, first, width), (each, width, 1))
    start = first * width
    return (
        one,
        MappedSlice("weight", 0, start, (groups, second, width), (each, width, 1)),
        (groups * each),
    )


@given(grids(), st.booleans())
def test_rows_are_added_where_they_are(
    drawn: tuple[MappedSlice, MappedSlice, int], turned: bool
) -> None:
    one, other, outputs = drawn
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return made.requires_grad_(True)

    base, updates = numbers(2, 3, outputs), [numbers(2, 3, s.length) for s in (one, other)]

    def made(base: Tensor) -> Tensor:
        return (base.transpose(0, 1).contiguous().transpose(0, 1) if turned else base) * 1.0

    found = _RowsAdded.apply(made(base), [one, other], *updates)
    expected = made(base)
    for rows, update in zip((one, other), updates, strict=True):
        expected = expected.index_add(-1, rows.places().flatten(), update)
    assert torch.equal(found, expected)
    weights = numbers(2, 3, outputs)
    for mine, theirs in zip(
        torch.autograd.grad((found * weights).sum(), [base, *updates]),
        torch.autograd.grad((expected * weights).sum(), [base, *updates]),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_what_is_kept_for_backward_is_thin() -> None:
    model = built("gpt_neox").train().requires_grad_(False)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    adapter = LoRA(rank=2, targets=QV).attach(model)
    layer = model.gpt_neox.layers[0].attention.query_key_value
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(5, 24))
    own = sum(p.numel() for name, p in adapter.named_parameters() if ".0." in name)
    # Each keeps the one input and its thin product; factors are kept as they are.
    assert sum(kept) == own + 2 * (5 * 24 + 5 * 2)


def test_bf16_autocast_and_dropout() -> None:
    plain = built("gpt_neox")
    model = copy.deepcopy(plain).bfloat16()
    adapter = stir(LoRA(rank=2, targets=QV).attach(model))
    expected = logits(with_deltas(copy.deepcopy(plain).bfloat16(), adapter))
    torch.testing.assert_close(logits(model).double(), expected, rtol=0, atol=2e-2)
    held = {n: t.clone() for n, t in model.state_dict().items() if "layers_by" not in n}
    with pytest.warns(UserWarning, match="rounded"):
        adapter.merge()
    adapter.unmerge()
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in held.items())
    model = copy.deepcopy(plain).train()
    adapter = stir(LoRA(rank=2, targets=QV, dropout=0.5).attach(model))
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(model)
        again = logits(model)
    assert not torch.equal(found, again)
    found.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in adapter.parameters())


def test_several_adapters_share_a_layer_and_merge_apart() -> None:
    plain = built("gpt2").bfloat16()
    model = copy.deepcopy(plain)
    one = stir(LoRA(rank=2, targets=("c_attn.q",)).attach(model, name="one"))
    other = stir(LoRA(rank=3, targets=("v",)).attach(model, name="other"))
    one.activate(alone=False)
    both = logits(model)
    with one.disabled():
        assert not torch.equal(logits(model), both)
    with pytest.warns(UserWarning, match="rounded"):
        one.merge()
    with pytest.warns(UserWarning, match="rounded"):
        other.merge()
    one.unmerge()
    other.unmerge()
    one.detach()
    other.detach()
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in plain.state_dict().items())


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_a_peft_file_is_one_lora_of_the_layer(name: str, tmp_path: Path) -> None:
    plain = built(name)
    adapter = stir(LoRA(rank=2, alpha=5.0, targets=QV).attach(copy.deepcopy(plain)))
    assert travel_of(adapter).ranks == (4, 4)
    adapter.save(tmp_path, form="peft")
    expected = logits(adapter.model)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path)
    torch.testing.assert_close(logits(theirs), expected, rtol=0, atol=1e-5)
    back = load(copy.deepcopy(plain), tmp_path)
    torch.testing.assert_close(logits(back.model), expected, rtol=0, atol=1e-5)
    fused = "c_attn" if name == "gpt2" else "query_key_value"
    assert {site.suffix for site in back.sites.values()} == {fused}
    folded = adapter.save(tmp_path / "folded", rank=2, tolerance=1e-4)
    assert folded is not None
    back = load(copy.deepcopy(plain), tmp_path / "folded")
    torch.testing.assert_close(logits(back.model), expected, rtol=0, atol=1e-4)


def test_randlora_of_a_slice_is_in_no_peft_file(tmp_path: Path) -> None:
    adapter = RandLoRA(rank=2, targets=QV).attach(built("gpt2"))
    with pytest.raises(InputError, match="PEFT has no randlora on a slice"):
        adapter.save(tmp_path, form="peft")


def test_copies_of_a_model_have_slices_of_their_own() -> None:
    model = built("gpt2")
    stir(LoRA(rank=2, targets=QV).attach(model))
    found = logits(model)
    other = copy.deepcopy(model)
    assert torch.equal(logits(other), found)
    layer = other.transformer.h[0].attn.c_attn
    assert layer.q_proj.fused is layer
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(logits(model), found)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_a_quantized_layer_becomes_dense_where_its_slices_merge(name: str) -> None:
    model = built(name)
    for path, layer in list(model.named_modules()):
        if path.endswith(("c_attn", "query_key_value")):
            weight = layer.weight.detach().T if name == "gpt2" else layer.weight.detach()
            quantized = NF4Linear.from_dense(weight, layer.bias.detach())
            model.set_submodule(path, quantized)
    before, plain = logits(model), repr(model)
    adapter = LoRA(rank=2, targets=QV).attach(model)
    assert torch.equal(logits(model), before)
    stir(adapter)
    found = logits(model)
    with pytest.raises(InputError, match=r"cannot be kept as nf4.*merge\(dense"):
        adapter.merge()
    assert torch.equal(logits(model), found)
    adapter.merge(dense=torch.float32)
    torch.testing.assert_close(logits(model), found, rtol=0, atol=1e-5)
    adapter.unmerge()
    assert torch.equal(logits(model), found)
    with pytest.warns(UserWarning, match="rounded"):
        adapter.merge(dense=torch.bfloat16)
    adapter.unmerge()
    adapter.detach()
    assert torch.equal(logits(model), before)
    assert repr(model) == plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_meta_it_has_the_sizes(dtype: torch.dtype) -> None:
    with on_meta(dtype):
        config = transformers.AutoConfig.for_model("phi3", **CONFIGS["phi3"])
        model = transformers.AutoModelForCausalLM.from_config(config)
        adapter = LoRA(rank=2, targets=("gate", "up_proj", "q")).attach(model)
    sizes = {site.suffix: site.out_features for site in adapter.sites.values()}
    assert sizes == {"q_proj": 24, "gate_proj": 40, "up_proj": 40}
    assert all(parameter.is_meta for parameter in adapter.parameters())
    assert sum(map(torch.numel, adapter.parameters())) == 2 * 2 * (64 + 48 + 64)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (DoRA(targets=QV), "dora computes its change with the output"),
        (Hydra(targets=QV), "hydra computes its change with the output"),
        (PiSSA(rank=2, targets=QV), "takes a part out of the layer's weight"),
        (LoRA(targets=("gate_proj",)), "no slice of a fused one.*q_proj, v_proj"),
        (LoRA(targets=("c_attn", "q")), "names this slice and the layer"),
        (LoRA(targets=("q",), exclude=("*.c_attn.*",)), "excluded again"),
        (LoRA(targets=("q",), exclude=("c_attn",)), "excluded again"),
    ],
)
def test_what_cannot_be_is_refused(value: Any, said: str) -> None:
    model = built("gpt2")
    before = repr(model)
    with pytest.raises(InputError, match=said):
        value.attach(model)
    assert repr(model) == before


def test_who_looks_at_data_and_a_layer_with_another_adapter_are_refused() -> None:
    model = built("gpt2")
    with pytest.raises(InputError, match="looks at the inputs and gradients"):
        LoRASB(targets=QV).attach(model, batches=[IDS], loss=lambda m, ids: m(ids).logits.sum())
    full = LoRA(targets=("c_attn",)).attach(model)
    with pytest.raises(InputError, match="has an adapter on all of it"):
        LoRA(targets=QV).attach(model, name="slices")
    full.detach()
    LoRA(targets=QV).attach(model, name="slices")
    with pytest.raises(InputError, match="slices of this layer have an adapter"):
        LoRA(targets=("c_attn",)).attach(model)


def test_a_separate_layer_is_meant_where_there_is_one() -> None:
    config = transformers.AutoConfig.for_model(
        "llama", num_key_value_heads=2, intermediate_size=40, **_SIZES
    )
    adapter = LoRA(targets=QV).attach(transformers.AutoModelForCausalLM.from_config(config))
    assert all(site.rows is None for site in adapter.sites.values())


def sharded(ranks: Ranks) -> list[Tensor]:
    """Logits after two updates and after a merge, with the adapter's factors; on ranks, FSDP2's."""
    model = built("gpt_neox")
    adapter = LoRA(rank=3, targets=QV).attach(model, seed=1)
    stir(adapter)
    if not ranks.alone:
        for block in model.gpt_neox.layers:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
    for _ in range(2):
        logits(model).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found = logits(model).clone()
        adapter.merge()
        merged = logits(model).clone()
        adapter.unmerge()
    state = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in adapter.parameters()]
    return [found, merged, *(t.detach().clone() for t in state)]


@pytest.mark.ranks
def test_sharded_by_fsdp_it_learns_and_merges_the_same(pool: Pool) -> None:
    one = sharded(Ranks())
    torch.testing.assert_close(one[0], one[1], rtol=0, atol=1e-5)
    for two in pool.run(sharded, ranks=2):
        for mine, theirs in zip(one, two, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)

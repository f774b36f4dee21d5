"""The gradient probe against the gradients that autograd computes of trained weights."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.gradient_probe import probe_gradients
from modicum.core.layers.layer_sites import Site, survey
from modicum.core.layers.linear_forms import full_weight, linear_form
from modicum.core.machine.memory import TensorMeter
from modicum.core.ranks.ranks import Ranks
from modicum.proofs.contracts.adapters.subjects import llama, tokens


def next_token(of: nn.Module, ids: Tensor) -> Tensor:
    targets = ids[:, 1:].flatten()
    return F.cross_entropy(of(ids[:, :-1]).flatten(0, 1), targets, ignore_index=0, reduction="sum")


def sites_of(of: nn.Module, *without: str) -> list[Site]:
    found = survey(of, ["linear"]).sites
    return [site for name, site in found.items() if not name.endswith(without)]


def kept(name: str, gradient: Tensor) -> dict[str, Tensor]:
    return {"gradient": gradient.clone()}


def probed(of: nn.Module, batches: Any, loss: Any = next_token, **given: Any) -> dict[str, Tensor]:
    sites = given.pop("sites", None) or sites_of(of, "lm_head")
    found = probe_gradients(of, batches, loss, kept, sites=sites, **given)
    return {name: own["gradient"] for name, own in found.items()}


def by_autograd(of: nn.Module, batches: list[Any], loss: Any = next_token) -> dict[str, Tensor]:
    of.eval().requires_grad_(True)
    sum((loss(of, batch) for batch in batches), torch.zeros(())).backward()
    grads = {n.removesuffix(".weight"): p.grad for n, p in of.named_parameters()}
    return {name: grad for name, grad in grads.items() if grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], off: float = 1e-5) -> None:
    assert found
    for name, gradient in found.items():
        scale = expected[name].abs().max()
        assert gradient.shape == expected[name].shape
        assert (gradient - expected[name]).abs().max() <= off * scale, name


@pytest.mark.parametrize("recompute", [False, True])
def test_it_is_autograds_gradient_and_nothing_is_left(recompute: bool) -> None:
    of, batches = llama(), [tokens(4), tokens(3, 6)]
    of.recompute = recompute
    of.train().model.norm.eval()
    of.lm_head.requires_grad_(False)
    trained = {name: p.requires_grad for name, p in of.named_parameters()}
    found = probed(of, batches)
    assert of.training
    assert not of.model.norm.training
    assert {name: p.requires_grad for name, p in of.named_parameters()} == trained
    assert all(parameter.grad is None for parameter in of.parameters())
    assert not any(module._forward_hooks for module in of.modules())
    assert_same(found, by_autograd(llama(), batches))
    assert probed(of, batches).keys() == found.keys()
    assert all(torch.equal(again, found[n]) for n, again in probed(of, batches).items())


def test_padding_counts_nothing() -> None:
    ids = tokens(3).clamp(min=1)
    padded = torch.cat([ids, ids.new_zeros(3, 4)], dim=1)
    assert_same(probed(llama(), [padded]), probed(llama(), [ids]))


class Twice(nn.Module):
    """One layer that is called twice, dropout, an operation in place, a vector as input."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(5, 5)
        self.bend, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.5)
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.bend(self.twice(input=x)))
        return self.last(self.twice(hidden).sum(0)) if x.ndim > 1 else self.last(hidden)


def square(of: nn.Module, batch: Tensor) -> Tensor:
    return of(batch).square().sum()


@pytest.mark.parametrize("shape", [(5,), (6, 5)])
def test_calls_of_a_layer_add_up_without_dropout(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    of, batch = Twice(), torch.randn(shape)
    found = probed(of, [batch], square)
    assert_same(found, by_autograd(of, [batch], square))


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_a_quantized_weight_has_the_gradient_of_what_it_represents(form: str) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    quantized = nn.Sequential(*dense)
    for index in (0, 2):
        weight = dense[index].weight.detach()
        quantized[index] = linear_form(form).from_dense(weight, dense[index].bias.detach())
        dense[index].weight.data = full_weight(quantized[index]).detach().clone()
    batch = torch.randn(8, 64)
    assert_same(probed(quantized, [batch], square), by_autograd(dense, [batch], square), 1e-4)


def test_a_bf16_model_is_summed_in_fp32_and_an_fp64_one_in_fp64() -> None:
    batches = [tokens(4)] * 3
    half = probed(llama().bfloat16(), batches)
    assert {gradient.dtype for gradient in half.values()} == {torch.float32}
    assert_same(half, probed(llama(), batches), 0.1)
    wide = probed(llama().double(), batches)
    assert {gradient.dtype for gradient in wide.values()} == {torch.float64}
    with torch.autocast("cpu", torch.bfloat16):
        cast = probed(llama(), batches)
    assert {gradient.dtype for gradient in cast.values()} == {torch.float32}
    assert_same(cast, probed(llama(), batches), 0.1)


@pytest.mark.parametrize(("on_disk", "there"), [(False, [4, 3, 2, 1]), (True, [1, 1, 1, 1])])
def test_layers_come_one_after_the_other(on_disk: bool, there: list[int], tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def use(name: str, gradient: Tensor) -> dict[str, Tensor]:
        gc.collect()
        full = [t for t in gc.get_objects() if type(t) is Tensor and t.shape == (8, 8)]
        # Of all gradients, those that are in memory: fake tensors of other tests are not.
        seen.append((name, len({t.data_ptr() for t in full})))
        return {"norm": gradient.norm()}

    of = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    batch = torch.randn(2, 8)
    folder = tmp_path / "new" if on_disk else None
    found = probe_gradients(of, [batch], square, use, sites=sites_of(of), folder=folder)
    assert [name for name, _ in seen] == ["0", "1", "2", "3"]
    counts = [count for _, count in seen]  # of other tests' tensors too
    assert [count - counts[-1] for count in counts] == [count - there[-1] for count in there]
    assert not list(tmp_path.glob("new/*"))
    plain = probed(of, [batch], square)
    for name, own in found.items():
        assert torch.equal(own["norm"], plain[name].norm())


def test_sums_are_in_memory_or_in_files(tmp_path: Path) -> None:
    of = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    batch, each = torch.randn(2, 64), 64 * 64 * 4
    gc.collect()
    with TensorMeter("cpu") as meter:
        probe_gradients(of, [batch], square, lambda name, gradient: {}, sites=sites_of(of))
    assert 6 * each <= (meter.peak or 0) < 8 * each
    files: list[str | None] = []

    def use(name: str, gradient: Tensor) -> dict[str, Tensor]:
        files.append(gradient.untyped_storage().filename)
        return {}

    probe_gradients(of, [batch], square, use, sites=sites_of(of), folder=tmp_path)
    assert len({file for file in files if file is not None}) == 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the device is the host")
def test_a_device_holds_one_layers_gradient_at_a_time() -> None:
    of = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6))).cuda()
    batch, each = torch.randn(2, 1024, device="cuda"), 4 * 2**20
    probed(of, [batch], square)  # what the libraries take
    with TensorMeter("cuda") as meter:
        before = torch.cuda.memory_allocated()
        probe_gradients(of, [batch], square, lambda name, gradient: {}, sites=sites_of(of))
    assert each <= (meter.peak or 0) - before < 1.2 * each


def test_recomputed_blocks_keep_no_inputs(tmp_path: Path) -> None:
    peaks = []
    for recompute in (False, True):
        of = llama(layers=6)
        of.recompute = recompute
        gc.collect()
        with TensorMeter("cpu") as meter:
            probed(of, [tokens(8, 24)], folder=tmp_path)
        peaks.append(meter.peak or 0)
    assert peaks[1] < 0.7 * peaks[0]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"batches": []}, "no example to look at"),
        ({"batches": [torch.ones(0, 5)]}, "no example to look at"),
        ({"loss": lambda of, batch: torch.ones(())}, "the loss has no gradient: none"),
        ({"loss": lambda of, batch: of.twice(batch).sum()}, r"at this layer; leave it out.*last"),
        ({"batches": [torch.full((2, 5), float("inf"))]}, "is not finite"),
        (
            {"sites": [Site("last", "embedding", 5, 2)]},
            "linear layers alone, not at this embedding",
        ),
    ],
)
def test_what_cannot_be_probed_says_why(given: dict[str, Any], problem: str) -> None:
    of = Twice()
    given = {"batches": [torch.ones(2, 5)], "loss": square} | given
    with pytest.raises(InputError, match=problem):
        probed(of, given.pop("batches"), given.pop("loss"), **given)
    assert not any(module._forward_hooks for module in of.modules())


def test_a_limit_and_progress() -> None:
    told: list[tuple[int, int | None]] = []
    batches = [torch.randn(4, 5) for _ in range(5)]
    probed(Twice(), batches, square, limit=9, progress=lambda done, of: told.append((done, of)))
    assert told == [(1, 5), (2, 5), (3, 5)]


def share(ranks: Ranks, folder: Path | None) -> tuple[dict[str, Tensor], list[str]]:
    """One rank of the last has no example; each makes its turn of the layers."""
    batches = [tokens(2, 5 + index) for index in range(3)]
    own = batches[ranks.rank :: ranks.size] if ranks.size < 4 else batches[ranks.rank :][:1]
    made: list[str] = []

    def use(name: str, gradient: Tensor) -> dict[str, Tensor]:
        made.append(name)
        return kept(name, gradient)

    of = llama()
    found = probe_gradients(
        of, own, next_token, use, sites=sites_of(of, "lm_head"), ranks=ranks, folder=folder
    )
    return {name: each["gradient"] for name, each in found.items()}, made


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_add_up_and_take_turns(pool: Pool, ranks: int, tmp_path: Path) -> None:
    alone, names = share(Ranks(), None)
    together = pool.run(share, tmp_path, ranks=ranks)
    assert sorted(name for _, made in together for name in made) == sorted(names)
    for found, _ in together:
        assert_same(found, alone)
        assert all(torch.equal(found[name], together[0][0][name]) for name in found)

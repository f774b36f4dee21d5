"""The proof of WeLore at a size of nothing: what is compared is as large, and the null falls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modicum.compress import WeLore
from modicum.core.contracts.catalog import find
from modicum.proofs.base import ProofRun
from modicum.proofs.compress import welore
from modicum.proofs.compress.recovery_bench import Code, PlainSVD
from modicum.proofs.compress.welore import EqualEnergy, only, small
from modicum.proofs.optim.text_bench import TextSize

TINY = TextSize(width=32, layers=1, mlp_width=48, tokens=16, rows=4, steps=8)


def model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(24, 24, bias=False) for _ in range(3)]
    with torch.no_grad():
        for rank, layer in zip((2, 8, 24), layers, strict=True):
            left = torch.randn(24, rank, generator=generator)
            layer.weight.copy_(left @ torch.randn(rank, 24, generator=generator))
    return nn.Sequential(*layers)


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_contenders_have_no_more_bytes_than_uniform_ranks(share: float) -> None:
    uniform = small(PlainSVD(share=share), model())[1]
    assert uniform <= share * 3 * 4 * 24 * 24
    for value in (WeLore(share=share), EqualEnergy(share=share)):
        made, held = small(value, model())
        assert 0 < held <= uniform
        assert held == sum(p.nbytes for p in made.parameters())


def test_a_part_is_trained_alone() -> None:
    made = small(WeLore(share=0.6), Code(TINY, 1, 8).model)[0]
    parts = {
        part: {n for n, p in only(made, part).named_parameters() if p.requires_grad}
        for part in ("all", "factors", "dense", "norms")
    }
    assert parts["all"] == {name for name, _ in made.named_parameters()}
    assert parts["factors"] == {n for n in parts["all"] if n.endswith((".down", ".up"))}
    assert not parts["factors"] & (parts["dense"] | parts["norms"])
    assert parts["norms"]


@pytest.mark.parametrize("null", [False, True])
def test_it_runs_and_the_null_is_not_below_uniform(
    monkeypatch: pytest.MonkeyPatch, null: bool
) -> None:
    monkeypatch.setattr(welore, "QUICK", TINY)
    monkeypatch.setattr(welore, "Code", lambda size, steps, rows, seed: Code(size, 2, 8, seed=seed))
    run = ProofRun(find("welore"), null=null, full=False)
    welore.prove(run)
    proof = run.conclude()
    assert not proof.defects
    planted = [one for one in proof.criteria if "planted" in one.sentence]
    assert len(planted) == 2
    assert all(one.passed != null for one in planted)

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from modicum.adapters.mos import MoS
from modicum.core.contracts.catalog import find
from modicum.proofs.adapters import mos as home
from modicum.proofs.adapters import permutation_bench
from modicum.proofs.adapters.mos import SHARDED, PureSharing
from modicum.proofs.base import ProofRun
from modicum.proofs.bench import sweep
from modicum.proofs.contracts.adapters.subjects import llama
from modicum.proofs.proof import Proof

TINY = replace(home.QUICK, symbols=8, tokens=8, width=16, mlp_width=32)
TINY = replace(TINY, pretraining_steps=30, steps=20)


def proof_of(monkeypatch: pytest.MonkeyPatch, *, null: bool, full: bool = False) -> Proof:
    monkeypatch.setattr(home, "QUICK", TINY)
    monkeypatch.setattr(permutation_bench, "FULL", TINY)
    monkeypatch.setattr(sweep, "_FURTHER", 0)  # so small, no rate is good
    run = ProofRun(find("mos"), null=null, full=full)
    home.prove(run)
    return run.conclude()


def test_it_is_compared_at_equal_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = proof_of(monkeypatch, null=False)
    (trained,) = (figure for figure in proof.figures if figure.name == "trained parameters")
    assert trained.method == trained.baseline == 4 * (4 * (16 + 16) + 2 * (16 + 32) + (32 + 16))
    assert proof.seeds == (0, 1)
    assert proof.figures[0].ratio != 1.0


def test_lora_in_its_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = proof_of(monkeypatch, null=True)
    assert proof.verdict == "does not hold", proof.reason
    assert proof.figures[0].ratio == 1.0


@pytest.mark.expensive
def test_in_the_full_run_all_nulls_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = proof_of(monkeypatch, null=True, full=True)
    assert proof.verdict == "does not hold", proof.reason
    assert len({criterion.null_is for criterion in proof.criteria}) == 3
    assert proof.criteria[-1].figure == 1.0
    assert vars(proof.against) == {"result": "equal", "rival": "the same rows for all layers"}


def test_pure_sharing_gives_all_layers_the_same() -> None:
    fields = SHARDED.model_dump() | {"rank": 2}
    shared = PureSharing(**fields).attach(llama())
    apart = MoS(**fields).attach(llama())
    for adapter, same in ((shared, True), (apart, False)):
        layers = dict(adapter.layers())
        one, other = (layers[f"model.layers.{n}.mlp.up_proj"].as_lora()[0] for n in (0, 1))
        assert torch.equal(one, other) == same

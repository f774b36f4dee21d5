"""Figures, criteria, nulls and verdicts; the method's own experiments are tested beside them."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import modicum.proofs
from modicum.core.contracts.catalog import MethodRecord, catalog, find
from modicum.core.contracts.method import Against, ClaimVerdict, verdict_of
from modicum.core.cores import usable_cores
from modicum.core.errors import InputError
from modicum.proofs import ProofRun, prove, write
from modicum.proofs.proof import Criterion, Proof, against_of, claim_verdict_of, nothing_stands

PLUGIN = Path(__file__).parents[1] / "contracts" / "plugins" / "outer.py"


def run(*, null: bool = False, full: bool = False) -> ProofRun:
    return ProofRun(find("lora"), null=null, full=full)


def measured(null: bool, *, bar: float = 3.0, blind: bool = False) -> ProofRun:
    """A proof of two parts; a `blind` one has a second part that no null can miss."""
    this = run(null=null)
    figure = this.contender(2.0, null=4.0, null_is="twice as much")
    this.figure("bytes", method=figure, baseline=4.0, claimed="half")
    this.at_most("bytes", figure, bar)
    quality = this.contender(0.9, null=0.1, null_is="a random answer")
    this.at_least("quality", 1.0 if blind else quality, 0.5)
    return this


def test_all_criteria_met_is_a_proof_that_holds() -> None:
    proof = measured(null=False).conclude()
    assert proof.verdict == "holds"
    assert proof.reason == "all 2 criteria are met"
    assert proof.figures[0].ratio == 0.5


def test_one_criterion_missed_is_a_proof_that_does_not_hold_and_says_why() -> None:
    proof = measured(null=False, bar=1.5).conclude()
    assert proof.verdict == "does not hold"
    assert proof.reason == "bytes: 2, and the bar is at most 1.5"


def test_a_null_run_hands_out_the_nulls_and_does_not_hold() -> None:
    proof = measured(null=True).conclude()
    assert proof.verdict == "does not hold"
    assert [criterion.figure for criterion in proof.criteria] == [4.0, 0.1]
    assert proof.undetected == ()


def test_a_null_that_meets_its_criteria_is_a_defect_even_if_another_is_caught() -> None:
    proof = measured(null=True, blind=True).conclude()
    assert proof.verdict == "holds"
    assert proof.reason == "a defect of this proof, it does not notice: a random answer"


def test_a_criterion_without_a_contender_is_refused() -> None:
    this = run()
    with pytest.raises(TypeError, match="nothing could miss it"):
        this.at_most("bytes", 1.0, 2.0)
    with pytest.raises(TypeError, match="states no criterion"):
        this.conclude()


def test_a_figure_that_is_no_number_passes_nothing() -> None:
    for relation in ("at most", "at least"):
        assert not Criterion("loss", math.nan, relation, 0.0, "null").passed
    this = run()
    this.contender(1, null=2, null_is="two")
    ratio = this.figure("bytes", method=3, baseline=0).ratio
    this.at_most("ratio", ratio, 1.0)
    proof = this.conclude()
    assert proof.verdict == "does not hold"
    assert proof.as_json()["figures"][0]["ratio"] is None
    json.dumps(proof.as_json(), allow_nan=False)


def test_the_record_says_what_where_and_how(tmp_path: Path) -> None:
    proof = measured(null=False).conclude()
    path = write(proof, tmp_path / "results")
    assert path == tmp_path / "results" / "lora.json"
    written = json.loads(path.read_text())
    assert written == proof.as_json()
    assert written["verdict"] == "holds"
    assert written["figures"] == [
        {"name": "bytes", "method": 2.0, "baseline": 4.0, "ratio": 0.5, "claimed": "half"}
    ]
    assert [(c["sentence"], c["relation"], c["bar"]) for c in written["criteria"]] == [
        ("bytes", "at most", 3.0),
        ("quality", "at least", 0.5),
    ]
    assert written["claim"] == find("lora").info.claim
    assert written["machine"]["cores"] >= 1
    assert set(written["versions"]) >= {"python", "torch"}
    full, null = run(full=True), measured(null=True)
    full.contender(1, null=2, null_is="two")
    full.at_most("it", 1, 1)
    assert write(full.conclude(), tmp_path).name == "lora.full.json"
    assert write(null.conclude(), tmp_path).name == "lora.null.json"


def test_progress_and_criteria_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told: list[dict[str, object]] = []
    proof = prove("outer", plugins=[PLUGIN], listener=told.append)
    assert proof.verdict == "holds"
    assert [event["event"] for event in told] == ["pace", "criterion"]
    assert told[1]["sentence"] == "something is trained"
    assert told[1]["passed"] is True
    assert prove("outer", plugins=[PLUGIN], null=True).verdict == "does not hold"


def test_the_record_has_the_threads_that_the_proof_ran_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        proof = prove("outer", plugins=[PLUGIN])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert proof.machine["threads"] == 1
    assert proof.machine["cores"] == usable_cores()


def test_unknown_methods_and_methods_without_a_proof_are_refused() -> None:
    with pytest.raises(InputError, match="Did you mean 'lora'"):
        prove("lorra")
    broken = PLUGIN.with_name("broken.py")
    with pytest.raises(InputError, match="no proof yet"):
        prove("broken", plugins=[broken])


def test_a_library_that_is_missing_is_named_with_its_remedy() -> None:
    with pytest.raises(InputError, match=r"pip install modicum\[hf\]"):
        run().library("no_such_library", "hf")


# The two parts of a verdict


def known_for(
    claim_verdict: ClaimVerdict = "not shown here", against: Against | None = None
) -> Any:
    """The record of a method whose known verdict is this."""
    record = find("mos")
    known = {"claim_verdict": claim_verdict, "against": against or Against(), "reason": ""}
    return replace(record, info=replace(record.info, **known))


def judged(
    claims: Sequence[float] = (),
    checks: Sequence[float] = (),
    ratios: Sequence[float] = (),
    *,
    record: Any = None,
    null: bool = False,
) -> Proof:
    """A proof whose figures are these, in a null run too, with bars of 1."""
    this = ProofRun(record or known_for(), null=null, full=False)
    this.contender(1, null=2, null_is="two")
    for figure in claims:
        this.at_most("loss", figure, 1.0)
    for figure in checks:
        this.at_most("budget", figure, 1.0, part="check")
    if ratios:
        this.against("a rival", "loss", ratios)
    return this.conclude()


@pytest.mark.parametrize(
    ("claims", "checks", "verdict"),
    [
        ([0.9, 0.5], [0.9], "holds"),
        ([0.9, 0.5], [], "holds"),
        ([0.9, 1.5], [0.9], "in part"),
        ([0.9, 0.5], [1.5], "in part"),
        ([1.2, 1.5], [0.9], "does not hold"),
        ([], [0.9], "not shown here"),
    ],
)
def test_the_claims_verdict_is_that_of_its_criteria(
    claims: list[float], checks: list[float], verdict: str
) -> None:
    proof = judged(claims, checks)
    assert proof.claim_verdict == verdict
    assert (proof.verdict == "holds") == (verdict == "holds")
    assert proof.as_json()["claim_verdict"] == verdict


@pytest.mark.parametrize(
    ("ratios", "result"),
    [
        ([0.8, 0.82], "better"),
        ([0.99], "better"),
        ([0.9, 1.05], "equal"),
        ([1.0], "equal"),
        ([0.95, 1.09], "equal"),
        ([1.2, 1.3], "worse"),
        ([1.001], "worse"),
        ([math.inf, 0.5], "worse"),
        ([math.nan], "worse"),
    ],
)
def test_a_rival_is_equal_within_the_spread(ratios: list[float], result: str) -> None:
    proof = judged([0.5], ratios=ratios)
    assert proof.as_json()["against"] == {"result": result, "rival": "a rival"}
    assert proof.claim_verdict == "holds"
    assert proof.verdict == ("does not hold" if result == "worse" else "holds")
    assert f"{Against(result, 'a rival')}" in proof.reason
    json.dumps(proof.as_json(), allow_nan=False)


def test_a_proof_names_one_rival_and_a_baseline_none() -> None:
    this = run()
    this.contender(1, null=2, null_is="two")
    this.against("one", "loss", [0.5])
    with pytest.raises(TypeError, match="has named its best simple alternative"):
        this.against("another", "loss", [0.4])
    assert this.conclude().against == Against("baseline")  # as the info of LoRA has it
    assert judged([0.5]).against == Against()


@pytest.mark.parametrize(
    ("seeds", "narrowly", "spread"),
    [((0.9, 1.3), True, 0.2828), ((1.09, 1.11), False, 0.01414), ((), False, None)],
)
def test_a_bar_missed_by_less_than_the_spread_says_so(
    seeds: tuple[float, ...], narrowly: bool, spread: float | None
) -> None:
    this = ProofRun(known_for(), null=False, full=False)
    this.contender(1, null=2, null_is="two")
    this.at_most("loss", 1.1, 1.0, seeds=seeds)
    proof = this.conclude()
    assert proof.claim_verdict == "does not hold"
    assert ("missed by less than its spread over seeds" in proof.reason) == narrowly
    [criterion] = proof.as_json()["criteria"]
    assert criterion["narrowly_missed"] == narrowly
    assert criterion["spread"] == (spread and pytest.approx(spread, rel=1e-3))


# What must fall under the null, and what must be found


def test_a_claim_that_stands_in_part_must_fall_from_there() -> None:
    record = known_for("in part", Against("worse", "a rival"))
    assert judged([1.5, 1.5], [0.5, 1.5], [1.0], record=record, null=True).defects == ()
    stays = judged([0.5, 1.5], ratios=[1.0], record=record, null=True)
    assert stays.defects == ("that the claim should have fallen (it holds in part)",)
    assert stays.verdict == "holds"
    assert judged([0.5, 1.5], record=known_for("holds"), null=True).defects == ()


def test_what_is_better_must_be_so_no_more() -> None:
    record = known_for("holds", Against("better", "a rival"))
    for ratio, defects in (
        (1.0, ()),
        (1.5, ()),
        (0.5, ("that a null is not better than a rival",)),
    ):
        proof = judged([1.5], ratios=[ratio], record=record, null=True)
        assert proof.defects == defects
        assert proof.verdict == ("holds" if defects else "does not hold")
    # That a null beats a rival which the method did not is no defect.
    equal = known_for("holds", Against("equal", "a rival"))
    assert judged([1.5], ratios=[0.5], record=equal, null=True).defects == ()


def planting(*, loss: float, plants: bool = True) -> ProofRun:
    """A null run where nothing stands, and what is planted has this loss."""
    record = known_for("does not hold", Against("worse", "a rival"))
    this = ProofRun(record, null=True, full=False)
    found = this.contender(1.4, null=2.0, null_is="two", planted=loss if plants else None)
    this.at_most("loss", found, 1.0)
    this.against("a rival", "loss", [found])
    return this


def test_where_nothing_stands_a_planted_effect_must_be_found() -> None:
    proof = planting(loss=0.5).conclude()
    assert (proof.planted, proof.defects) == (True, ())
    assert (proof.claim_verdict, proof.against.result) == ("holds", "better")
    assert proof.verdict == "holds"
    assert proof.reason.startswith("what was planted is found; all 2 criteria are met")
    missed = planting(loss=1.3).conclude()
    assert missed.defects == ("what was planted",)
    assert missed.verdict == "does not hold"
    with pytest.raises(TypeError, match=r"contender\(planted=...\)"):
        planting(loss=0.5, plants=False).conclude()


def test_a_plant_is_for_null_runs_of_what_does_not_stand() -> None:
    for record, null, expected in (
        (known_for("does not hold"), False, 1.4),
        (known_for("does not hold"), True, 0.5),
        (known_for("in part"), True, 2.0),
        (known_for("does not hold", Against("better", "a rival")), True, 2.0),
        (known_for(), True, 2.0),
        (known_for(against=Against("baseline")), True, 2.0),
        (known_for(against=Against("equal", "a rival")), True, 0.5),
    ):
        this = ProofRun(record, null=null, full=False)
        assert this.contender(1.4, null=2.0, null_is="two", planted=0.5) == expected


# What was found, and what is said of it

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "proofs"
ON_GPU = RESULTS.parent / "gpu.json"
SOURCES = Path(modicum.proofs.__file__).parents[1]
PROVEN = [record for record in catalog().values() if record.info.claim_verdict != "not shown here"]


@pytest.mark.committed
@pytest.mark.parametrize("record", PROVEN, ids=lambda record: record.name)
def test_a_method_says_what_its_full_experiment_said(record: MethodRecord) -> None:
    """Both parts; and what holds, or is better, does not fail at the quick size."""
    info = record.info
    quick, full = (
        json.loads((RESULTS / f"{record.name}{size}.json").read_text()) for size in ("", ".full")
    )
    assert (quick["mode"], full["mode"], quick["null"], full["null"]) == ("quick", "full", 0, 0)
    assert full["claim_verdict"] == info.claim_verdict
    assert full["against"] == asdict(info.against)
    listed = record.as_json()
    for part in ("claim", "claim_verdict", "against", "verdict"):
        assert full[part] == listed[part]
    if info.claim_verdict == "holds":
        assert quick["claim_verdict"] == "holds"
    if info.against.result == "better":
        assert quick["against"]["result"] in ("better", "not shown here")
    flawless = info.claim_verdict == "holds" and info.against.result in ("better", "baseline")
    assert bool(info.reason) == (not flawless)


STANDS_NOT = [record for record in catalog().values() if nothing_stands(record.info)]


@pytest.mark.parametrize("record", STANDS_NOT, ids=lambda record: record.name)
def test_where_nothing_stands_the_proof_has_something_to_find(record: MethodRecord) -> None:
    source = SOURCES / "proofs" / record.room / f"{record.name}.py"
    assert "planted=" in source.read_text(encoding="utf-8")


@pytest.mark.committed
def test_what_is_said_to_run_on_a_gpu_was_seen_there_without_a_fault() -> None:
    rows = json.loads(ON_GPU.read_text(encoding="utf-8"))["methods"]
    faulty = {row["name"].partition(",")[0] for row in rows if row["faults"]}
    ran = {row["name"].partition(",")[0] for row in rows if "losses_apart" in row}
    assert {record.name for record in catalog().values() if record.info.run_on_gpu} == ran - faulty


@pytest.mark.committed
@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.name)
def test_a_committed_verdict_follows_from_its_own_criteria(file: Path) -> None:
    result = json.loads(file.read_text())
    known = {field.name for field in fields(Criterion)}
    criteria = [Criterion(**{k: c[k] for k in known}) for c in result["criteria"]]
    assert [c.as_json() for c in criteria] == result["criteria"]
    against = against_of(criteria)
    if result["against"]["result"] == "baseline":
        against = find(result["name"]).info.against
    assert result["claim_verdict"] == claim_verdict_of(criteria)
    assert result["against"] == asdict(against)
    assert result["verdict"] == verdict_of(result["claim_verdict"], against)


def test_the_readme_says_what_the_proofs_said() -> None:
    """If this fails: python scripts/readme.py."""
    root = Path(__file__).parents[2]
    script = runpy.run_path(str(root / "scripts" / "readme.py"))
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert script["renewed"](readme) == readme
    for record in PROVEN:
        row = f"| {record.title} | {record.info.claim_verdict} | {record.info.against} |"
        assert row in readme


def test_importing_proofs_imports_no_torch() -> None:
    code = "import modicum.proofs, modicum.proofs.base, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

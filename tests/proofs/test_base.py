"""Figures, criteria, nulls and verdicts; the method's own experiments are tested beside them."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from modicum.core.contracts.catalog import catalog, find
from modicum.core.errors import InputError
from modicum.proofs import ProofRun, prove, write
from modicum.proofs.base import Criterion

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


def test_progress_and_criteria_are_told() -> None:
    told: list[dict[str, object]] = []
    proof = prove("outer", plugins=[PLUGIN], listener=told.append)
    assert proof.verdict == "holds"
    assert [event["event"] for event in told] == ["criterion"]
    assert told[0]["sentence"] == "something is trained"
    assert told[0]["passed"] is True
    assert prove("outer", plugins=[PLUGIN], null=True).verdict == "does not hold"


def test_unknown_methods_and_methods_without_a_proof_are_refused() -> None:
    with pytest.raises(InputError, match="Did you mean 'lora'"):
        prove("lorra")
    broken = PLUGIN.with_name("broken.py")
    with pytest.raises(InputError, match="no proof yet"):
        prove("broken", plugins=[broken])


def test_a_library_that_is_missing_is_named_with_its_remedy() -> None:
    with pytest.raises(InputError, match=r"pip install modicum\[hf\]"):
        run().library("no_such_library", "hf")


def test_every_method_that_says_it_was_proven_has_its_result() -> None:
    """What holds must do so at both sizes; what does not has failed in the whole experiment."""
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "proofs"
    for record in catalog().values():
        holds = record.info.holds
        if holds == "not proven yet":
            continue
        for name in (f"{record.name}.json", f"{record.name}.full.json"):
            result = json.loads((results / name).read_text())
            assert result["null"] is False
            if holds == "holds" or result["mode"] == "full":
                assert result["verdict"] == holds, name
        assert bool(record.info.reason) == (holds == "does not hold")


def test_the_readme_says_what_the_proofs_said() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for verdict, line in (("holds", "- the claim holds: "), ("does not hold", "not wholly: ")):
        (told,) = re.findall(re.escape(line) + "(.*)[;.]", readme)
        records = [record for record in catalog().values() if record.info.holds == verdict]
        assert set(told.split(", ")) == {record.info.title.partition(":")[0] for record in records}


def test_importing_proofs_imports_no_torch() -> None:
    code = "import modicum.proofs, modicum.proofs.base, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

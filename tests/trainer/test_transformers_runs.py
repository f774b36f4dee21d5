"""Runs of decoders of transformers: planned, trained, adapted, interrupted, exported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import transformers
from decoders import add_tokenizer, decoder_folder, theirs
from peft import PeftModel
from pool import Pool
from safetensors.torch import load_file
from tests.trainer.conftest import full
from tests.trainer.test_ranks import outcome, rows, trains

import modicum
from modicum.cli.commands.merge import merge
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.models import traced_cache
from modicum.models.traced_cache import TraceRequest
from modicum.planner.choose import COMPILE
from modicum.serve import load_run
from modicum.verify import verify_export

ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": {"method": "lora", "rank": 4, "dropout": 0.2}},
    "nf4": {"adapter": {"method": "lora", "rank": 4}, "linear": {"method": "nf4"}},
    "slices": {"adapter": {"method": "lora", "rank": 4, "targets": ["q_proj", "v_proj"]}},
}
FIRST: list[Any] = ["gpt2-nf4", "qwen3-full", "gemma-lora"]
LATER = ["gpt2-full", "gpt_neox-lora", "gpt_neox-slices", "opt-full", "mixtral-lora"]
FIRST += [pytest.param(name, marks=pytest.mark.slow) for name in LATER]
pytestmark = [
    pytest.mark.filterwarnings("ignore:all-linear leaves out"),  # experts
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler looks
]


@pytest.fixture(autouse=True, scope="module")
def traced_here() -> Iterator[None]:
    """Traces are made in this process: to start another takes longer than all else."""

    def here(request: TraceRequest, wanted: list[Any]) -> Any:
        asked = {"build": request.build, "arguments": dict(request.arguments), "wanted": wanted}
        return json.loads(json.dumps(traced_cache.answer(asked)))["passes"]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(traced_cache, "_traced_apart", here)
        yield


def values(base: Path, dataset: Path, how: str, **sections: Any) -> dict[str, Any]:
    made = full(dataset, **(ADAPTERS[how] | sections)) | {"model": {"path": str(base)}}
    made["training"] |= {"steps": 12, "learning_rate": 5e-3}
    return made


@pytest.fixture(scope="module", params=FIRST)
def trained(
    request: pytest.FixtureRequest, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A run folder, and the recipe that made it."""
    name, how = request.param.split("-")
    folder = tmp_path_factory.mktemp(f"{name}-{how}")
    base = add_tokenizer(decoder_folder(folder / "base", name), dataset.read_text())
    made = values(base, dataset, how)
    assert trains(Ranks(), made, folder / "run") == "done"
    return folder / "run", made


@pytest.mark.expensive
def test_the_loss_falls_and_the_forecast_holds(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    losses = [row["loss"] for row in rows(folder)]
    assert mean(losses[6:]) < mean(losses[:6]) - 0.05  # rows differ more than a step learns
    peak = json.loads((folder / "run.json").read_text())["peak_bytes"]
    experts = "mixtral" in str(folder)  # where data decides, the plan has the most
    assert peak["predicted"] == pytest.approx(peak["measured"], rel=0.6 if experts else 0.1)


@pytest.mark.expensive
def test_interrupted_it_resumes_to_the_bit(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, made = trained
    assert trains(Ranks(), made, tmp_path / "run", (0, 7)).startswith("4: stopped")
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(folder)


@pytest.mark.expensive
@torch.no_grad()
def test_what_it_exports_computes_what_it_learned(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    talk = load_run(folder)
    ids = torch.tensor([talk.tokenizer.encode("the cat sees")])
    found = talk.model(ids)
    if talk.adapter is None:
        assert torch.equal(theirs(folder / "model")(ids).logits, found)
        return
    # PEFT would have to quantize alike, and has no slices.
    if "nf4" not in str(folder) and "slices" not in str(folder):
        twin = PeftModel.from_pretrained(theirs(folder.parent / "base"), folder / "adapter")
        torch.testing.assert_close(twin(ids).logits, found, rtol=0, atol=1e-4)
    assert list(talk.write("the cat", max_tokens=3, temperature=0.0))


@pytest.mark.expensive
@pytest.mark.parametrize("trained", FIRST[:1], indirect=True)
@torch.no_grad()
def test_a_run_on_four_bits_merges_into_what_it_computes(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, made = trained
    assert made["linear"] == {"method": "nf4"}
    merge(folder, tmp_path / "merged")
    assert "rounded" not in capsys.readouterr().err  # the merged weights are fp32
    talk = load_run(folder)
    ids = torch.tensor([talk.tokenizer.encode("the cat sees")])
    found = theirs(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(found, talk.model(ids), rtol=0, atol=1e-4)
    assert talk.adapter is not None
    talk.adapter.deactivate()
    assert (found - talk.model(ids)).abs().max() > 1e-2


@pytest.mark.expensive
def test_a_compressed_model_is_kept_small(dataset: Path, tmp_path: Path) -> None:
    base = add_tokenizer(decoder_folder(tmp_path / "base", "gpt2"), dataset.read_text())
    made = values(base, dataset, "full", compress={"method": "fwsvd", "examples": 16})
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    small, dense = (
        sum(file.stat().st_size for file in (tmp_path / "run" / name).glob("*.safetensors"))
        for name in ("compressed", "model")
    )
    assert small < 0.75 * dense
    done = verify_export(tmp_path / "run", prompts=1, tokens=4)
    assert done.passed
    assert [check["check"] for check in done.checks][1:] == ["exported", "compressed"]


@pytest.mark.slow
def test_documents_are_computed_one_at_a_time_where_nothing_keeps_them_apart(
    dataset: Path, tmp_path: Path
) -> None:
    base = add_tokenizer(decoder_folder(tmp_path / "base", "bloom"), dataset.read_text())
    made = values(base, dataset, "full")
    plan = modicum.plan(modicum.Recipe(**made))
    assert plan.inputs.described.endswith("the documents of a row one at a time")
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    peak = json.loads((tmp_path / "run" / "run.json").read_text())["peak_bytes"]
    assert peak["predicted"] == pytest.approx(peak["measured"], rel=0.2)
    made["training"]["compile"] = "blocks"
    with pytest.raises(InputError, match=r"training\.compile.*one at a time"):
        modicum.plan(modicum.Recipe(**made))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["gemma", "qwen3"])
def test_sharded_over_ranks_it_learns_the_same(
    name: str, dataset: Path, tmp_path: Path, pool: Pool
) -> None:
    base = add_tokenizer(decoder_folder(tmp_path / "base", name), dataset.read_text())
    made = values(base, dataset, "full") | {"parallel": {"strategy": "fsdp"}}
    assert pool.run(trains, made, tmp_path / "two", ranks=2, timeout=600) == ["done", "done"]
    assert trains(Ranks(), made, tmp_path / "one") == "done"
    two, one = ([row["loss"] for row in rows(tmp_path / run)] for run in ("two", "one"))
    assert two == pytest.approx(one, rel=1e-3)
    ids = torch.randint(0, 300, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        shares, alone = (theirs(tmp_path / run / "model")(ids).logits for run in ("two", "one"))
    torch.testing.assert_close(shares, alone, rtol=0, atol=1e-2)


def in_half(folder: Path) -> Path:
    """An ERNIE 4.5 MoE as transformers writes it: bf16, and what chooses experts in fp32."""
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 320,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 16,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "initializer_range": 0.3,
    }  # fmt: skip
    made = transformers.AutoConfig.for_model("ernie4_5_moe", **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_base_of_bf16_that_chooses_experts_in_fp32_stays_what_it_is(
    strategy: str, dataset: Path, tmp_path: Path, pool: Pool
) -> None:
    base = add_tokenizer(in_half(tmp_path / "base"), dataset.read_text())
    stored = load_file(base / "model.safetensors").values()
    assert {tensor.dtype for tensor in stored} == {torch.bfloat16, torch.float32}
    adapter = {"method": "lora", "rank": 4, "targets": ["q_proj", "v_proj"]}
    made = values(base, dataset, "full", adapter=adapter)
    made["training"]["steps"] = 6
    plan = modicum.plan(modicum.Recipe(**made))
    assert plan.recipe.training.precision == "bf16"
    content = modicum.train(plan, tmp_path / "one", listener=lambda _: None)
    weights = content["measured_by_kind"]["weight"]
    assert plan.prediction.ledger.bytes("weight") == pytest.approx(weights, rel=1e-3)
    made["parallel"] = {"strategy": strategy}
    assert pool.run(trains, made, tmp_path / "two", ranks=2, timeout=600) == ["done", "done"]
    two, one = ([row["loss"] for row in rows(tmp_path / run)] for run in ("two", "one"))
    assert two == pytest.approx(one, rel=2e-2)  # a rounding may choose another expert


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_compiled_blocks_learn_the_same(recompute: str, dataset: Path, tmp_path: Path) -> None:
    base = add_tokenizer(decoder_folder(tmp_path / "base", "qwen3"), dataset.read_text())
    made = values(base, dataset, "full")
    made["training"] |= {"recompute": recompute, "compile": "blocks"}
    plan = modicum.plan(modicum.Recipe(**made)).chosen(COMPILE, "blocks", "asked for")
    modicum.train(plan, tmp_path / "compiled")
    last = rows(tmp_path / "compiled", "plan")[-1]["choices"]
    assert {"field": COMPILE, "value": "blocks", "why": "asked for"} in last
    made["training"] |= {"recompute": "none", "compile": "none"}
    assert trains(Ranks(), made, tmp_path / "eager") == "done"
    compiled, eager = (
        [row["loss"] for row in rows(tmp_path / run)] for run in ("compiled", "eager")
    )
    assert compiled == pytest.approx(eager, rel=1e-3)

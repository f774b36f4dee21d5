"""What the diagnosis of attention heads says: of which tensors, over ranks, and in a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoders import DECODERS, decoder_folder
from pool import Pool
from torch import Tensor, nn

from modicum.adapters import LoRA, approx_attention
from modicum.adapters.diagnosis import DiagnosisContext
from modicum.adapters.head_scores import needed_degree, sufficient_degree
from modicum.adapters.lora_limits import EXACT, LINEAR, WITHOUT_OUTLIERS, LoRALimits
from modicum.core.contracts.method import Context
from modicum.core.errors import InputError
from modicum.core.layers.attention_calls import SeenAttention, seen_attention
from modicum.core.layers.taylor_attention import columns
from modicum.core.ranks.ranks import Ranks
from modicum.models import huggingface
from modicum.models.rope import rotate
from modicum.proofs.adapters.attention_bench import head, series_of
from modicum.proofs.contracts.adapters.subjects import LLAMA, llama, stir, tokens
from modicum.proofs.contracts.transformers_loop import hugging_face_llama
from modicum.recipe import Recipe
from modicum.report import write
from modicum.report.folder import read
from modicum.report.view import findings
from modicum.trainer import continued, train


class Heads(nn.Module):
    """One attention of given tensors, in a module of its own."""

    def __init__(self, *given: Tensor, **named: Any) -> None:
        super().__init__()
        self.given, self.named = given, named

    def forward(self) -> Tensor:
        return F.scaled_dot_product_attention(*self.given, **{"scale": 1.0, **self.named})


def looked(model: nn.Module, *inputs: Any, value: LoRALimits | None = None) -> list[dict[str, Any]]:
    runtime = (value or LoRALimits()).bind(Context(model))
    with runtime.looking(), torch.no_grad():
        model(*inputs)
    return runtime.findings()


def of(q: Tensor, k: Tensor, *, value: LoRALimits | None = None, **named: Any) -> dict[str, Any]:
    [row] = looked(Heads(q, k, k, **named), value=value)
    return row


# What is seen


def test_queries_and_keys_are_those_after_rotation() -> None:
    model, given = llama(), {}

    def keep(module: Any, args: tuple[Any, ...]) -> None:
        x, _, sequence = args
        q, k = (
            part(x).unflatten(-1, (-1, module.head_width))
            for part in (module.q_proj, module.k_proj)
        )
        given[len(given)] = rotate(q, sequence), rotate(k, sequence)

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(keep)
    rows = looked(model, tokens())
    width, heads = LLAMA.width // LLAMA.heads, LLAMA.heads
    assert [(row["layer"], row["head"]) for row in rows] == [
        (f"model.layers.{layer}.self_attn", head) for layer in range(2) for head in range(heads)
    ]
    for row in rows:
        q, k = given[int(row["layer"].split(".")[2])]
        q, k = q[:, :, row["head"]], k[:, :, row["head"] * k.shape[2] // heads]
        scores = (q @ k.mT).tril() * width**-0.5
        largest = max(float(q.abs().max()), float(k.abs().max())) * width**-0.25
        assert row["gamma"] == pytest.approx(largest, abs=1e-5)
        assert row["largest_score"] == pytest.approx(float(scores.abs().max()), abs=1e-5)
        assert (row["length"], row["width"]) == (tokens().shape[1], width)
        over = largest / math.sqrt(math.log(tokens().shape[1]))
        assert row["over_threshold"] == pytest.approx(over, abs=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_decoder_of_transformers_is_seen(kv_heads: int) -> None:
    model = hugging_face_llama(num_key_value_heads=kv_heads, attn_implementation="sdpa")
    rows = looked(model, tokens())
    assert [row["layer"] for row in rows] == ["model.layers.0.self_attn"] * 2
    seen: list[SeenAttention] = []
    with seen_attention(model, seen.append), torch.no_grad():
        model(tokens())
    assert seen[0].query.shape == seen[0].key.shape == (3, 2, 8, 8)
    entries = torch.maximum(seen[0].query.abs(), seen[0].key.abs()).amax((0, 2, 3)) * 8**-0.25
    assert [row["gamma"] for row in rows] == pytest.approx(entries.tolist(), abs=1e-5)
    # Padding is no key: a row that is padded to twice its length sees as many.
    padded = F.pad(tokens(1), (8, 0), value=1)
    mask = F.pad(torch.ones_like(tokens(1)), (8, 0))
    runtime = LoRALimits().bind(Context(model))
    with runtime.looking(), torch.no_grad():
        model(padded, attention_mask=mask)
    assert {row["length"] for row in runtime.findings()} == {8}


@pytest.mark.expensive
@pytest.mark.parametrize("name", sorted(DECODERS))
def test_decoders_of_many_kinds_are_seen_or_refused(name: str, tmp_path: Path) -> None:
    model = huggingface.load(decoder_folder(tmp_path, name)).eval()
    if name == "bloom":  # has an attention of its own, with biases that grow with distance
        with pytest.raises(InputError, match="no attention was seen"):
            looked(model, tokens())
        return
    rows = looked(model, tokens())
    assert [row["head"] for row in rows] == [0, 1, 2, 3] * 2
    assert {row["length"] for row in rows} == {5 if name == "mistral" else 8}


def test_attention_by_other_means_is_refused() -> None:
    model = hugging_face_llama(attn_implementation="eager")
    with pytest.raises(InputError, match="attn_implementation='sdpa'"):
        looked(model, tokens())


def test_what_adapters_add_is_a_part_of_gamma() -> None:
    model = llama()
    adapter = stir(LoRA(rank=2, alpha=64.0).attach(model))
    inputs: dict[str, Tensor] = {}
    for name, _ in adapter.layers():
        model.get_submodule(name).register_forward_hook(
            lambda module, given, out, name=name: inputs.update({name: given[0]})
        )
    rows = looked(model, tokens())
    added: dict[str, float] = {}
    for name, layer in adapter.layers():
        where, _, last = name.rpartition(".")
        if last in ("q_proj", "k_proj", "v_proj"):
            largest = float((inputs[name] @ layer.delta().T).detach().abs().max()) * 4**-0.25
            added[where] = max(added.get(where, 0.0), largest)
    for row in rows:
        assert row["adapter"] == pytest.approx(added[row["layer"]], rel=1e-4)
        assert row["gamma"] >= row["adapter"]
    assert all(row["adapter"] == 0 for row in looked(llama(), tokens()))


def test_the_linear_path_stands_in_a_decoder_of_transformers() -> None:
    from transformers import AttentionInterface

    def series(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **named: Any
    ) -> Any:
        given: dict[str, Any] = {"scale": named["scaling"], "is_causal": True, "enable_gqa": True}
        return approx_attention(query, key, value, 6, **given).transpose(1, 2), None

    AttentionInterface.register("series", series)
    model = hugging_face_llama(num_attention_heads=4, num_key_value_heads=2)
    adapter = stir(LoRA(rank=2).attach(model))
    found = []
    for kind in ("sdpa", "series"):
        model.set_attn_implementation(kind)
        logits = model(tokens(), use_cache=False).logits
        found.append([logits, *torch.autograd.grad(logits.square().sum(), adapter.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


# What follows from it


def test_verdicts_below_and_above_the_threshold() -> None:
    below, above = (head(gamma, 1024) for gamma in (1.0, 3.0))
    row = of(below.q, below.k)
    assert row["verdict"] == LINEAR
    assert row["columns"] == columns(4, row["degree"])
    assert row["speedup"] == pytest.approx(1024 / (4 * row["columns"]), abs=1e-5)
    assert row["error"] <= LoRALimits().tolerance
    assert row["degree"] <= row["degree_by_bound"]
    row = of(above.q, above.k)
    assert (row["verdict"], row["degree"]) == (EXACT, None)
    assert row["over_threshold"] > 1


@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_a_tolerance_holds_for_gradients_too(gamma: float) -> None:
    each = head(gamma, 512)
    row = of(each.q, each.k, value=LoRALimits(most_degree=12))
    assert row["degree"] is not None
    assert each.error(series_of(row["degree"])) < 2 * LoRALimits().tolerance


def test_training_moves_a_head_over_the_limit() -> None:
    verdicts = []
    for scale in (1.0, 20.0):
        each = head(0.9, 1024)
        verdicts.append(of(each.q * scale, each.k)["verdict"])
    assert verdicts == [LINEAR, EXACT]


def test_a_few_large_tokens_are_outliers() -> None:
    each = head(0.8, 1024)
    q, k = each.q.clone(), each.k.clone()
    q[..., 5, :] = k[..., 17, :] = 4.0
    assert of(q, k)["verdict"] == WITHOUT_OUTLIERS
    assert of(q, k, value=LoRALimits(outliers=0.0))["verdict"] == EXACT
    assert of(each.q, each.k)["verdict"] == LINEAR


def test_wide_heads_have_too_many_columns() -> None:
    each = head(0.5, 256, width=64)
    row = of(each.q, each.k, value=LoRALimits(tolerance=1e-3))
    assert row["verdict"] == EXACT
    assert row["columns"] == columns(64, row["degree"])
    assert row["speedup"] < 1


def test_a_mask_that_changes_scores_has_no_linear_path() -> None:
    each = head(0.5, 1024)
    hidden = torch.zeros(1024, 1024).masked_fill(torch.ones(1024, 1024).triu(1) > 0, -torch.inf)
    assert of(each.q, each.k, attn_mask=hidden)["verdict"] == LINEAR
    assert of(each.q, each.k, attn_mask=hidden + 0.1)["verdict"] == EXACT
    by_words = of(each.q, each.k, is_causal=True)
    assert (
        by_words
        == of(each.q, each.k, attn_mask=hidden)
        == of(each.q, each.k, attn_mask=hidden == 0)
    )


def test_numbers_that_are_not_finite_are_none() -> None:
    each = head(0.5, 64)
    each.q[..., 3, :] = torch.nan
    row = of(each.q, each.k)
    assert row["verdict"] == EXACT
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_degrees_of_errors_and_bounds() -> None:
    assert needed_degree(torch.tensor([0.1, 0.02, 0.001]), 0.02) == 2
    assert needed_degree(torch.tensor([0.1, 0.02]), 0.01) is None
    for score in (0.1, 1.0, 4.0):
        degree = sufficient_degree(score, 1e-3)
        assert degree is not None
        assert score ** (degree + 1) / math.factorial(degree + 1) <= 1e-3
    assert sufficient_degree(math.inf, 1e-3) is None


def test_a_spoilt_file_has_a_table_of_what_is_readable() -> None:
    rows = [{"a": 1, "b": None}, 3, {"b": "x", "c": 2}]
    [table] = findings({"step": "?", "diagnosis": rows, "other": 5, "empty": []}, {})
    assert [column["title"] for column in table["columns"]] == ["a", "b"]
    assert table["step"] is None
    assert table["rows"] == [["1", "–"], ["–", "x"]]


# In a recipe


def as_a_rank(ranks: Ranks) -> list[dict[str, Any]]:
    model = stir(LoRA(rank=2).attach(llama())).model
    runtime = LoRALimits().bind(DiagnosisContext(model, ranks=ranks))
    with runtime.looking(), torch.no_grad():
        model(tokens(4)[[0, 1] if ranks.first else [2, 3]])
    return runtime.findings()


@pytest.mark.expensive
@pytest.mark.ranks
def test_ranks_say_what_one_process_says(pool: Pool) -> None:
    one, other = pool.run(as_a_rank, ranks=2)
    assert one == other
    model = stir(LoRA(rank=2).attach(llama())).model
    for row, alone in zip(one, looked(model, tokens(4)), strict=True):
        numbers = [key for key, value in alone.items() if isinstance(value, float)]
        assert {k: row[k] for k in numbers} == pytest.approx(
            {k: alone[k] for k in numbers}, abs=1e-5
        )
        assert row["verdict"] == alone["verdict"]


@pytest.mark.expensive
def test_a_run_has_a_row_for_each_head_in_its_report(tmp_path: Path) -> None:
    lines = (json.dumps({"text": f"as {n % 5} is a tree of {n % 7}"}) for n in range(60))
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    data = {"path": str(tmp_path / "data.jsonl"), "sequence_length": 16}
    recipe = Recipe(
        model={"layers": 2, "width": 16, "heads": 2, "vocabulary_size": 300},
        data={**data, "validation_fraction": 0.2},
        training={"steps": 3, "batch_size": 4},
        evaluation={"every": 2, "rows": 4},
        samples={"count": 0},
        diagnosis=LoRALimits(samples=8),
    )
    run = tmp_path / "run"
    train(continued(recipe, run), run)
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 2, 3]
    assert all(len(row["findings"]["diagnosis"]) == 4 for row in rows)
    assert rows[0]["findings"] != rows[2]["findings"]
    folder = read(run)
    [table] = findings(folder.findings, folder.recipe)
    assert (table["name"], table["step"], len(table["rows"])) == ("diagnosis", 3, 4)
    page = write(run).read_text(encoding="utf-8")
    assert "<h2>Diagnosis, step 3</h2>" in page
    assert all(f"model.layers.{layer}.self_attn" in page for layer in range(2))
    # It changes nothing: the same losses without it.
    plain = tmp_path / "plain"
    train(continued(recipe.changed(diagnosis=None), plain), plain)
    losses = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run, plain)
    ]
    assert losses[0] == losses[1]


def test_a_section_has_methods_of_its_kind_alone() -> None:
    with pytest.raises(InputError, match=r"stands in the section 'diagnosis'.*allowed: .*lora"):
        Recipe(adapter={"method": "lora_limits"}, model={"path": "x"})
    with pytest.raises(InputError, match=r"stands in the section 'adapter'.*allowed: lora_limits"):
        Recipe(diagnosis={"method": "lora"})
    with pytest.raises(InputError, match=r"unknown method.*allowed: lora_limits\. Did you mean"):
        Recipe(diagnosis={"method": "lora_limit"})
    with pytest.raises(InputError, match="does not combine with"):
        Recipe(diagnosis={"method": "lora_limits"}, training={"compile": "blocks"})

"""Sums of batches that add up over batches and ranks, and the metrics of tasks."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool

from modicum.core.ranks.ranks import Ranks
from modicum.data.images import Textures
from modicum.models import ModelConfig, convnet, llama
from modicum.recipe import Recipe
from modicum.tasks.causal_lm import CausalLM
from modicum.tasks.images import ImageClasses
from modicum.tasks.metrics import class_metrics, class_sums, perplexity, right_answers
from modicum.trainer.evaluate import evaluate

LABELS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20)


def scores(answers: list[int]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(answers), 4).float()


@given(LABELS, st.integers(1, 20))
def test_macro_f1_and_shares_are_scikit_learns_however_rows_are_batched(
    pairs: list[tuple[int, int]], size: int
) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    labels, answers = map(list, zip(*pairs, strict=True))
    sums: Counter[str] = Counter()
    for start in range(0, len(pairs), size):
        part = slice(start, start + size)
        # A label that is not known counts nowhere.
        known = torch.tensor([*labels[part], -100])
        sums.update(class_sums(scores([*answers[part], 0]), known))
    found = class_metrics(sums, "abcd")
    assert found["macro_f1"] == pytest.approx(
        metrics.f1_score(labels, answers, average="macro", zero_division=0)
    )
    right = Counter(a for a, b in pairs if a == b)
    shares = {"abcd"[n]: right[n] / count for n, count in Counter(labels).items()}
    assert found["by_class"] == pytest.approx(shares)


def test_tokens_that_are_not_trained_are_never_right() -> None:
    logits = torch.zeros(1, 3, 5)
    logits[0, :, 2] = 1.0
    assert right_answers(logits, torch.tensor([[2, -100, 3]])) == 1.0
    assert perplexity(math.log(7.0)) == pytest.approx(7.0)
    assert perplexity(1e6) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_text_has_token_accuracy_and_perplexity() -> None:
    task = CausalLM()
    config = ModelConfig(vocabulary_size=11, width=8, layers=1, heads=2, kv_heads=2, mlp_width=8,
                         context=6)  # fmt: skip
    model = llama.create(config, seed=0)
    batch = task.example(config, task.row(Recipe(data={"sequence_length": 6})))
    batch.labels[0, :4] = -100
    sums = task.evaluate(model, batch)
    found = task.measures(sums, batch.count)
    assert set(found) == set(task.metrics) <= set(task.better)
    assert found["perplexity"] == pytest.approx(math.exp(sums["loss"] / 2))
    right = (task.outputs(model, batch).argmax(-1) == batch.labels).sum()
    assert found["token_accuracy"] == float(right) / 2


def evaluated(ranks: Ranks, rows: int) -> dict[str, object]:
    task = ImageClasses(images=8, classes=3, widths=(4,)).bind(None)
    model = convnet.create(task.look(Recipe()).config, seed=0)
    return evaluate(
        task, model, Textures(8, 3, seed=1), rows=rows, micro_batch_size=2, precision="fp32",
        ranks=ranks, check=lambda: None,
    )  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("rows", [1, 7])
def test_ranks_measure_what_one_process_does(pool: Pool, rows: int) -> None:
    alone = evaluated(Ranks(), rows)
    assert alone["images"] == rows
    assert set(alone["by_class"]) == {str(n) for n in range(min(rows, 3))}  # type: ignore[call-overload]
    for found in pool.run(evaluated, rows, ranks=2):
        assert found["loss"] == pytest.approx(alone["loss"])
        for name in ("accuracy", "macro_f1", "by_class", "images"):
            assert found[name] == alone[name]

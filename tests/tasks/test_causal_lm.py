from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import modicum
from modicum.core.layers.form_plan import FormPlan, LayerForm
from modicum.core.ranks.ranks import Ranks
from modicum.data.batch import Batch
from modicum.data.tokenizer import Tokenizer
from modicum.models.config import ModelConfig
from modicum.models.llama import create
from modicum.tasks import CausalLM, causal_lm


@pytest.fixture
def model():
    config = ModelConfig(vocabulary_size=30, width=16, layers=1, heads=2, context=8)
    return create(config, 0, torch.device("cpu"), torch.float32)


def rows(model, count: int) -> Batch:
    tokens = torch.randint(0, 30, (count, 9), generator=torch.Generator().manual_seed(0))
    labels = tokens[:, 1:].clone()
    labels[0, :5] = -100
    return Batch(tokens[:, :-1], labels)


def test_sums_of_parts_are_the_sum_of_the_whole(model):
    task, batch = CausalLM(), rows(model, 5)
    whole, count = task.evaluate(model, batch)["loss"], batch.count
    parts = batch.split(2)
    assert count == sum(part.count for part in parts) == 35
    losses = [task.evaluate(model, part)["loss"] for part in parts]
    assert whole == pytest.approx(sum(losses), rel=1e-6)


def test_the_sum_is_that_of_the_probabilities(model):
    batch = rows(model, 2)
    probabilities = torch.softmax(model(batch.input_ids, None), -1).detach()
    expected = 0.0
    for row in range(2):
        for place in range(8):
            label = int(batch.labels[row, place])
            if label != -100:
                expected -= float(torch.log(probabilities[row, place, label]))
    assert CausalLM().loss_sum(model, batch).item() == pytest.approx(expected, rel=1e-5)


def test_a_batch_of_which_nothing_is_trained_sums_to_zero(model):
    batch = rows(model, 2)
    nothing = Batch(batch.input_ids, torch.full_like(batch.labels, -100))
    assert CausalLM().evaluate(model, nothing) == {"loss": 0.0, "token_accuracy": 0.0}


def test_a_model_that_has_diverged_writes_nothing(monkeypatch):
    tokenizer = Tokenizer.train(iter(["a b c d"] * 4), 300)
    config = ModelConfig(vocabulary_size=300, width=16, layers=1, heads=2, context=8)
    model = create(config, 0, torch.device("cpu"), torch.float32)
    model.get_parameter("model.norm.weight").data.fill_(float("nan"))
    text = SimpleNamespace(tokenizer=tokenizer, validation=None)
    monkeypatch.setattr(causal_lm, "_text", lambda data: text)
    monkeypatch.setattr(causal_lm, "prompts", lambda *_: ["a b"])
    found = CausalLM().samples(modicum.Recipe(), model, None, Ranks())
    assert found == [{"prompt": "a b", "text": ""}]


def test_exports_name_the_end_of_the_texts_that_were_trained(model, monkeypatch, tmp_path):
    low = LayerForm("low_rank", {"rank": 2})
    forms = FormPlan(layers={"model.layers.0.self_attn.q_proj": low})
    config = replace(model.config, eos_token_id=3, forms=forms)
    small = create(config, 0, torch.device("cpu"), torch.float32)
    tokenizer, data = SimpleNamespace(eos_id=5), SimpleNamespace(files=())
    monkeypatch.setattr(causal_lm, "_text", lambda data: SimpleNamespace(tokenizer=tokenizer))
    CausalLM().export(small, data, tmp_path / "model")
    assert CausalLM().export_small(small, data, tmp_path / "compressed")
    for name in ("model", "compressed"):
        said = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert said["eos_token_id"] == [3, 5]

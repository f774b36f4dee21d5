"""Decoders of transformers behind the engine: their cached keys and values give their own text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import DECODERS, add_tokenizer, decoder_folder, theirs
from tests.serve.test_in_turns import drained, tokens

from modicum.serve.in_turns import InTurns
from modicum.serve.loading import load_served
from modicum.serve.tokens import TokenRequest

PROMPTS = (tuple(range(3, 15)), (7, 9))
MADE = 12


@pytest.fixture(scope="module", params=DECODERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = decoder_folder(tmp_path_factory.mktemp(request.param) / request.param, request.param)
    return add_tokenizer(made, "to be or not to be")


@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers_and_of_full_passes(folder: Path) -> None:
    served, model = load_served(folder), theirs(folder)
    engine = InTurns(served.model)
    for number, prompt in enumerate(PROMPTS):
        engine.submit(TokenRequest(str(number), prompt, MADE))
    found = drained(engine)
    for number, prompt in enumerate(PROMPTS):
        given: Any = torch.tensor([prompt])
        ids = given
        for _ in range(MADE):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
        made = ids[0, len(prompt) :].tolist()
        assert tokens(found[str(number)]) == made
        # By itself it ends at 0, which here is a token like others.
        wanted = model.generate(
            given, max_new_tokens=MADE, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert wanted[0, len(prompt) :].tolist() == made


@torch.no_grad()
def test_logits_are_made_of_the_last_place_alone(folder: Path) -> None:
    model: Any = load_served(folder).model
    seen = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, given, made: seen.append(made.shape[1]))
    states = model.new_states(1, 20)
    model.continued(torch.tensor([PROMPTS[0]]), states)
    assert seen == [1]

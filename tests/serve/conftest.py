"""A small model with a chat template, adapters of it, and a server that answers with them."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from modicum.adapters import LoRA
from modicum.core.local_server import address, listening
from modicum.data.named_templates import NAMED
from modicum.data.tokenizer import Tokenizer
from modicum.data.tokenizer_files import CONFIGURATION
from modicum.models import ModelConfig, create, load, save
from modicum.serve.engine_thread import EngineThread
from modicum.serve.in_turns import InTurns
from modicum.serve.loading import load_served
from modicum.serve.served_models import ServedModels

CONTEXT = 96
MESSAGES = [{"role": "user", "content": "to be 🙂"}]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Of a few merges only, so that most characters are several tokens."""
    texts = iter(["to be or not to be, that is the question"] * 9)
    return Tokenizer.train(texts, vocabulary_size=290, template=NAMED["chatml"])


@pytest.fixture(scope="session")
def with_bytes() -> Tokenizer:
    """As SentencePiece's: blanks before words, and bytes for characters that it does not know."""
    words = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "o", "b", "e"]
    model = tokenizers.models.BPE(
        {word: place for place, word in enumerate(words)}, [], byte_fallback=True
    )
    inner = tokenizers.Tokenizer(model)
    decoders = tokenizers.decoders
    inner.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    steps = (decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), *steps])
    return Tokenizer(inner, 0)


@dataclass(frozen=True)
class Folders:
    """A model, runs with an adapter of it, and adapters without their runs."""

    model: Path
    run: Path
    other: Path
    peft: Path


def make_model(folder: Path, tokenizer: Tokenizer, seed: int = 0) -> Path:
    """A random model folder, which writes many different tokens."""
    config = ModelConfig(
        vocabulary_size=tokenizer.vocabulary_size, width=16, layers=2, heads=4, kv_heads=2,
        context=CONTEXT, initializer_range=0.4, eos_token_id=tokenizer.eos_id,
    )  # fmt: skip
    save(create(config, seed), folder)
    tokenizer.save(folder)
    return folder


def make_adapter(folder: Path, model: Path, tokenizer: Tokenizer, seed: int) -> Path:
    """The folder of a run that made an adapter, as far as it is served."""
    adapter = LoRA(rank=2).attach(load(model))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    adapter.save(folder / "adapter", base_model=str(model))
    tokenizer.save(folder / "tokenizer")
    (folder / "run.json").write_text(json.dumps({"data": {"conversations": True}}))
    return folder


def ending_with(word: str, run: Path, folder: Path) -> tuple[Path, int]:
    """A copy of a run whose tokenizer ends texts with another token, and that token."""
    shutil.copytree(run, folder)
    file = folder / "tokenizer" / CONFIGURATION
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": word}))
    return folder, Tokenizer.load(folder / "tokenizer").eos_id


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Folders:
    place = tmp_path_factory.mktemp("served")
    model = make_model(place / "model", tokenizer)
    run = make_adapter(place / "run", model, tokenizer, seed=1)
    other = make_adapter(place / "other", model, tokenizer, seed=2)
    peft = make_adapter(place / "plain", model, tokenizer, seed=3) / "adapter"
    return Folders(model, run, other, peft)


@pytest.fixture(scope="session")
def served(folders: Folders) -> ServedModels:
    return load_served(folders.run, {"other": folders.other, "peft": folders.peft})


@contextmanager
def running(
    served: ServedModels, engine: Any = None, room: int = 32, **options: Any
) -> Iterator[str]:
    """A server on a port of its own; the address of its endpoint."""
    uvicorn = pytest.importorskip("uvicorn")
    from modicum.serve.endpoint import Endpoint

    thread = EngineThread(engine or InTurns(served.model, served.adapters), room=room)
    endpoint = Endpoint(served, thread, **options)
    config = uvicorn.Config(endpoint.application(), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    with listening("127.0.0.1", 0) as listener:
        runner = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        runner.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"{address('127.0.0.1', listener)}/v1"
        finally:
            server.should_exit = True
            thread.close()
            runner.join()


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold within a minute."""
    deadline = time.monotonic() + 60
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(scope="session")
def url(served: ServedModels) -> Iterator[str]:
    with running(served) as address:
        yield address


@pytest.fixture(scope="session")
def client(url: str) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)

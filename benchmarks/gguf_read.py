"""Whether llama.cpp writes of a GGUF file what the model wrote that the file was made of.

Small decoders of every architecture that `modicum export` takes, two runs of modicum, an adapter
merged and one as a file of its own are read back by llama-cpp-python. Compared are the tokens of
texts, the greedy text after prompts that llama.cpp splits into tokens itself, and the logits of
the same tokens. The result names the build: `pip install llama-cpp-python` compiles llama.cpp.

    python benchmarks/gguf_read.py

It computes with keys and values in fp32 (llama.cpp's default is fp16), so that what differs are
the file's weights, and what llama.cpp itself rounds in products with them. Texts that part where
two tokens are closer than that are counted apart, as ties.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import HERE, alone, say, write_result

from modicum.cli.exporting import exported
from modicum.core.extras import library
from modicum.data.tokenizer import Tokenizer
from modicum.models.gguf import DTYPES
from modicum.serve import Conversation, load_run

PROMPTS, TOKENS, CONTEXT, VOCABULARY = 6, 32, 128, 384
_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": CONTEXT,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
_LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied embeddings": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, llama3 scaling": {"rope_parameters": _LLAMA_3},
    "llama, linear scaling": {"rope_parameters": _LINEAR},
    "llama, wide heads": {"head_dim": 32},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen2, linear scaling": {"rope_parameters": _LINEAR},
    "qwen3": {},
    "qwen3, tied embeddings": {"tie_word_embeddings": True},
    "gemma": {},
}
_RECIPE: dict[str, Any] = {
    "model": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "vocabulary_size": VOCABULARY},
    "data": {"sequence_length": CONTEXT},
    "training": {"steps": 60, "batch_size": 8, "learning_rate": 5e-3},
    "samples": {"count": 0},
}


def text() -> str:
    """What tokenizers and runs are trained on, and prompts are taken from."""
    files = sorted((HERE.parent / "docs").rglob("*.md"))
    return "".join(file.read_text(encoding="utf-8") for file in files)


def decoders(folder: Path) -> Iterator[tuple[str, Path]]:
    """A folder with random weights and a trained tokenizer for each architecture."""
    transformers = library("transformers", "hf", "this benchmark")
    tokenizer = Tokenizer.train(iter([text()]), VOCABULARY)
    for number, (name, changes) in enumerate(DECODERS.items()):
        target = folder / f"decoder-{number}"
        kind = name.partition(",")[0]
        config = transformers.AutoConfig.for_model(kind, **{**_SIZES, **changes})
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in made.parameters():  # biases and norms begin as zeros and ones
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
        made.save_pretrained(target)
        tokenizer.save(target)
        yield name, target


def runs(folder: Path) -> Iterator[tuple[str, Path]]:
    """Runs of modicum: on texts, a LoRA on that model, and one on conversations."""
    import modicum

    (folder / "text.txt").write_text(text(), encoding="utf-8")
    pieces = [line for line in text().splitlines() if 20 < len(line) < 90][:400]
    talks = (
        {
            "messages": [
                {"role": "user", "content": f"Line {n}?"},
                {"role": "assistant", "content": p},
            ]
        }
        for n, p in enumerate(pieces)
    )
    (folder / "talks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in talks))
    new, tuned = folder / "new", {**_RECIPE, "adapter": {"method": "lora", "rank": 4}}
    chat = {**_RECIPE, "data": {**_RECIPE["data"], "path": str(folder / "talks.jsonl")}}
    on_text = {**_RECIPE, "data": {**_RECIPE["data"], "path": str(folder / "text.txt")}}
    recipes = {
        "run on texts": (new, on_text),
        "run of a LoRA, merged": (
            folder / "tuned",
            {**tuned, "data": on_text["data"], "model": {"path": str(new / "model")}},
        ),
        "run on conversations": (folder / "chat", chat),
    }
    for name, (target, recipe) in recipes.items():
        modicum.train(modicum.plan(modicum.Recipe(**recipe)), target)
        yield name, target


class Reader:
    """A GGUF file as llama.cpp reads it."""

    def __init__(self, file: Path, adapter: Path | None = None) -> None:
        llama_cpp = library("llama_cpp", "gguf", "this benchmark")
        single = llama_cpp.GGML_TYPE_F32
        self.model = llama_cpp.Llama(
            str(file), n_ctx=CONTEXT, n_threads=1, logits_all=True, verbose=False,
            type_k=single, type_v=single, flash_attn=False,
            lora_path=None if adapter is None else str(adapter),
        )  # fmt: skip

    def tokens(self, prompt: str) -> list[int]:
        """A text's tokens, by llama.cpp's own tokenizer."""
        found: list[int] = self.model.tokenize(prompt.encode(), add_bos=True, special=True)
        return found

    def asked(self, question: str) -> str:
        """The prompt of a question, by the file's chat template as llama-cpp-python runs it."""
        formats = library("llama_cpp.llama_chat_format", "gguf", "this benchmark")
        name = self.model.detokenize
        formatter = formats.Jinja2ChatFormatter(
            template=self.model.metadata["tokenizer.chat_template"],
            eos_token=name([self.model.token_eos()], special=True).decode(),
            bos_token=name([self.model.token_bos()], special=True).decode(),
        )
        messages = [{"role": "user", "content": question}]
        return str(formatter(messages=messages).prompt)

    def write(self, ids: list[int]) -> list[int]:
        """The greedy tokens that follow."""
        self.model.reset()
        written: list[int] = []
        for token in self.model.generate(ids, temp=0.0):
            if token == self.model.token_eos() or len(written) == TOKENS:
                break
            written.append(token)
        return written

    def logits(self, ids: list[int]) -> torch.Tensor:
        """[T, vocabulary] of a text's tokens."""
        self.model.reset()
        self.model.eval(ids)
        return torch.from_numpy(np.array(self.model.scores[: len(ids)]))


def compared(made: Conversation, reader: Reader, prompts: list[str]) -> dict[str, Any]:
    """Over the prompts: whose tokens and whose greedy text are equal, and the logits' error.

    `ties` are texts that part where the logits of both tokens are closer than twice the error is.
    """
    same_tokens = same_text = ties = 0
    error = largest = 0.0
    for prompt in prompts:
        made.forget()
        text = "".join(made.write(prompt, max_tokens=TOKENS, temperature=0.0))
        ids = reader.tokens(prompt if made.template is None else reader.asked(prompt))
        written = reader.write(ids)
        same_tokens += made.history[: len(ids)] == ids
        said = reader.model.detokenize(written).decode(errors="replace")
        same = said == text and made.history == [*ids, *written]
        same_text += same
        with torch.no_grad():
            expected = made.model(torch.tensor([made.history]))
        expected = getattr(expected, "logits", expected)[0].float()
        own = float((reader.logits(made.history) - expected).abs().max())
        ties += not same and margin(expected, made.history, [*ids, *written]) <= 2 * own
        error = max(error, own)
        largest = max(largest, float(expected.abs().max()))
    count = len(prompts)
    return {
        "prompts": count,
        "same_tokens": same_tokens,
        "same_text": same_text,
        "ties": ties,
        "logits_error": error / largest,
    }


def margin(logits: torch.Tensor, made: list[int], other: list[int]) -> float:
    """By how much the first token in which two texts differ is preferred in one of them.

    Args:
        logits: of `made`, [T, vocabulary].
    """
    for place, (one, another) in enumerate(zip(made, other, strict=False)):
        if one != another:
            return float(logits[place - 1, one] - logits[place - 1, another])
    return float("inf")


def main() -> None:
    """Make the models, read their files back, and write the result."""
    llama_cpp = library("llama_cpp", "gguf", "this benchmark")
    step = len(text()) // PROMPTS
    prompts = [text()[n * step : n * step + 60].strip() for n in range(PROMPTS)]
    found: dict[str, dict[str, Any]] = {}
    with alone(), tempfile.TemporaryDirectory(prefix="modicum-gguf-") as temporary:
        folder = Path(temporary)
        for name, made in (*decoders(folder), *runs(folder)):
            found[name] = {}
            for dtype in DTYPES:
                file = exported(made, folder / "model.gguf", adapter=False, dtype=dtype)
                found[name][dtype] = compared(load_run(made, device="cpu"), Reader(file), prompts)
                say(f"{name}, {dtype}: {found[name][dtype]}")
        base = exported(folder / "new", folder / "base.gguf", adapter=False, dtype="f32")
        own = exported(folder / "tuned", folder / "lora.gguf", adapter=True, dtype="f32")
        name = "run of a LoRA, a file of its own"
        found[name] = {
            "f32": compared(load_run(folder / "tuned", device="cpu"), Reader(base, own), prompts)
        }
        say(f"{name}: {found[name]}")
    exact = [each["f32"] for each in found.values()]
    counted = sum(each["prompts"] for each in exact)
    figures = {
        "models": found,
        "different_texts": counted - sum(each["same_text"] + each["ties"] for each in exact),
        "ties": sum(each["ties"] for each in exact),
        "different_tokens": counted - sum(each["same_tokens"] for each in exact),
        "largest_error": max(each["logits_error"] for each in exact),
    }
    settings = {
        "prompts": PROMPTS, "tokens": TOKENS, "context": CONTEXT,
        "llama_cpp_python": llama_cpp.__version__, "keys_and_values": "f32",
    }  # fmt: skip
    write_result("gguf", figures, settings)


if __name__ == "__main__":
    main()

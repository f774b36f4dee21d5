"""Whether examples keep their prompts, and whether what is shown as trained is what is trained.

Rows of four kinds of files are packed, and for each trained token it is asked whether the prompt of
its example stands complete before it. Conversations are written by twelve chat templates, with and
without a token at the beginning, with system turns and turns of tools; in each row the tokens that
`modicum data` shows as trained are held against those whose labels the loss sums, in their order.
"""

from __future__ import annotations

import csv
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import HERE, say, write_result

from modicum.core.errors import InputError
from modicum.core.extras import library
from modicum.data import IGNORED, PackedExamples, Tokenizer, open_source, prepare
from modicum.data.chat_template import ChatTemplate
from modicum.data.view import view_of

sys.path.insert(0, str(HERE.parent))
from tests.data.chat_templates import TEMPLATES, TOKENS

EXAMPLES, TALKS, LENGTH, VOCABULARY = 600, 60, 128, 512
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|eot_id|>", "<|end|>", "<end_of_turn>"]
WORDS = [
    "the",
    "model",
    "answers",
    "what",
    "it",
    "was",
    "asked",
    "and",
    "no",
    "more",
    "than",
    "that",
    "to",
    "whoever",
    "asks",
]


def words(draw: random.Random, most: int) -> str:
    """A few words."""
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, most)))


def example(draw: random.Random, number: int) -> dict[str, Any]:
    """A prompt and an answer that names it."""
    asked = f"question {number}: {words(draw, 20)}?"
    return {"prompt": asked, "completion": f"answer {number}: {words(draw, 12)}."}


def files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The same examples as four kinds of files, one of them of conversations."""
    draw = random.Random(0)
    rows = [example(draw, number) for number in range(EXAMPLES)]
    for name in ("jsonl", "json", "csv", "parquet"):
        path = folder / f"rows.{name}"
        if name == "jsonl":
            path.write_text("".join(json.dumps({"messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]}) + "\n" for row in rows))  # fmt: skip
        elif name == "json":
            path.write_text(json.dumps([
                {"instruction": row["prompt"], "output": row["completion"]} for row in rows
            ]))  # fmt: skip
        elif name == "csv":
            with open(path, "w", newline="") as handle:
                writer = csv.DictWriter(handle, ["prompt", "completion"])
                writer.writeheader()
                writer.writerows(rows)
        else:
            arrow = library("pyarrow", "data", "writing Parquet")
            parquet = library("pyarrow.parquet", "data", "writing Parquet")
            parquet.write_table(arrow.Table.from_pylist(rows), path)
        yield name, path


def intact(path: Path, tokenizer: Tokenizer) -> dict[str, float]:
    """Trained tokens of a file, and how many have all of their prompt before them, in percent."""
    draw = random.Random(0)
    prompts = [example(draw, number)["prompt"] for number in range(EXAMPLES)]
    source = open_source(path, template=ChatTemplate(TEMPLATES["chatml"], TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        store = prepare(source, tokenizer, Path(folder) / "data", model_vocabulary=VOCABULARY)
        rows = PackedExamples(store.train, LENGTH)
        trained = kept = 0
        for index in range(len(rows)):
            before = ""
            for tokens, flag in view_of(rows, index).parts():
                text = tokenizer.decode(tokens, skip_special_tokens=False)
                if flag:
                    number = int(text.split("answer ")[1].split(":")[0])
                    trained += len(tokens)
                    kept += len(tokens) * (prompts[number] in before)
                before = text
    assert trained == rows.total_trained_tokens
    return {"trained_tokens": trained, "intact_percent": 100 * kept / trained}


def talk(draw: random.Random) -> list[dict[str, Any]]:
    """A conversation: a system turn or none, a few exchanges, a tool's turn or none."""
    said: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        said.append({"role": "system", "content": words(draw, 5)})
    for _ in range(draw.randint(1, 3)):
        said.append({"role": "user", "content": words(draw, 9)})
        if draw.random() < 0.3:
            calls = [{"function": {"name": "f"}}]
            said.append({"role": "assistant", "content": "", "tool_calls": calls})
            said.append({"role": "tool", "content": words(draw, 3)})
        said.append({"role": "assistant", "content": words(draw, 9)})
    return said


def differing(name: str, tokens: dict[str, str], tokenizer: Tokenizer) -> dict[str, int]:
    """Over the conversations that a template takes, trained tokens and those that differ."""
    draw, template, taken = random.Random(1), ChatTemplate(TEMPLATES[name], tokens), []
    for messages in (talk(draw) for _ in range(TALKS)):
        try:
            template.conversation(messages)
            taken.append(messages)
        except InputError:  # some have no system turn, or no tools
            continue
    scores = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0))
    found = {"conversations": len(taken), "trained_tokens": 0, "differing_tokens": 0}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        lines = (json.dumps({"messages": messages}) + "\n" for messages in taken)
        (folder / "talks.jsonl").write_text("".join(lines))
        source = open_source(folder / "talks.jsonl", template=template)
        store = prepare(source, tokenizer, folder / "data", model_vocabulary=VOCABULARY)
        rows = PackedExamples(store.train, LENGTH, too_long="split")
        for index in range(len(rows)):
            batch, view = rows.batch([index]), view_of(rows, index)
            logits = scores.expand(LENGTH, VOCABULARY)
            each = F.cross_entropy(logits, batch.labels[0], ignore_index=IGNORED, reduction="none")
            summed = [
                (int(label), round(float(loss), 4))
                for label, loss in zip(batch.labels[0], each, strict=True)
                if label != IGNORED
            ]
            shown = [
                (token, round(float(-scores.log_softmax(0)[token]), 4))
                for token, flag in zip(view.tokens, view.trained, strict=True)
                if flag
            ]
            found["trained_tokens"] += len(summed)
            found["differing_tokens"] += sum(a != b for a, b in zip_longest(summed, shown))
    return found


def main() -> None:
    """Measure both, and write the result."""
    texts = (example(random.Random(number), number) for number in range(200))
    tokenizer = Tokenizer.train(
        (f"{row['prompt']} {row['completion']}" for row in texts), VOCABULARY - len(SPECIAL)
    )
    tokenizer.inner.add_special_tokens(SPECIAL)
    with tempfile.TemporaryDirectory(prefix="modicum-examples-") as folder:
        kinds = {name: intact(path, tokenizer) for name, path in files(Path(folder))}
    templates = {}
    for name in TEMPLATES:
        for with_begin in (True, False):
            tokens = TOKENS if with_begin else {**TOKENS, "bos_token": ""}
            key = name if with_begin else f"{name}, no begin"
            templates[key] = differing(name, tokens, tokenizer)
            say(f"{key}: {templates[key]}")
    figures = {
        "files": kinds,
        "least_intact_percent": min(kind["intact_percent"] for kind in kinds.values()),
        "templates": templates,
        "least_conversations": min(each["conversations"] for each in templates.values()),
        "differing_tokens": sum(each["differing_tokens"] for each in templates.values()),
    }
    settings = {"examples": EXAMPLES, "conversations": TALKS, "sequence_length": LENGTH}
    write_result("examples", figures, settings)


if __name__ == "__main__":
    main()

"""`modicum init`: a recipe to start from."""

from __future__ import annotations

import json
from pathlib import Path

from modicum.core.errors import InputError
from modicum.core.files import write_text
from modicum.recipe_yaml import json_schema, load

SCHEMA = "recipe.schema.json"
_HEAD = """\
# yaml-language-server: $schema={schema}
# A recipe of modicum. What is left out has its default; `modicum schema` lists everything.
"""
_NEW_MODEL = """\
model:                     # a new model; for a trained one: modicum init --model FOLDER
  layers: 4
  width: 256
  heads: 4
  vocabulary_size: 4096
"""
_OLD_MODEL = """\
model:
  path: {model}
"""
_DATA = """\
data:
  path: {data}             # a folder of text files, a text file, or a .jsonl file
  sequence_length: 256     # tokens in a row
  validation_fraction: 0.05
"""
_ADAPTER = """\
adapter:                   # leave out to train every weight
  method: {adapter}
"""
_TRAINING = """\
training:
  steps: 500               # or epochs: 3
  batch_size: 16           # sequences in an update
  micro_batch_size: auto   # how many of them at a time: the planner's choice
  learning_rate: {rate}
  warmup_steps: 20
checkpoint:
  every: "5m"              # or a number of steps
budget:
  memory: {memory}          # bytes on the accelerator, or of the process on a CPU
"""


def write_recipe(
    out: Path, *, model: str | None, data: str | None, adapter: str | None, memory: str | None
) -> list[Path]:
    """Write `out` and the schema next to it; both paths, in that order.

    Raises:
        InputError: `out` is there already, or what was asked for makes no valid recipe.
    """
    if out.exists():
        raise InputError("this file is there already; give another --out", file=out)
    adapted = model is not None and adapter is not None
    text = _HEAD.format(schema=SCHEMA)
    text += _OLD_MODEL.format(model=_quoted(model)) if model is not None else _NEW_MODEL
    text += _DATA.format(data=_quoted(data))
    if adapted:
        text += _ADAPTER.format(adapter=adapter)
    rate = "1e-3" if adapted or model is None else "1e-4"
    text += _TRAINING.format(rate=rate, memory=memory or "null ")
    out.parent.mkdir(parents=True, exist_ok=True)
    schema = out.with_name(SCHEMA)
    write_text(out, text)
    try:
        load(out)
    except InputError:
        out.unlink()
        raise
    write_text(schema, json.dumps(json_schema(), indent=2) + "\n")
    return [out, schema]


def _quoted(path: str | None) -> str:
    return "null" if path is None else json.dumps(path, ensure_ascii=False)

"""The paths in a recipe, spelled so that they mean the same in any working directory.

They are the fields named `path` (those of `data.sources` too), those whose names end in `_path`, a
tokenizer, a chat template, the adapter that training starts from, and plugins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_OTHERS = {("data", "tokenizer"), ("data", "chat_template"), ("model", "adapter")}
# Chat templates by name (`data.named_templates`); a file that is called so is `./chatml`.
CHAT_TEMPLATES = ("chatml", "llama-3", "zephyr", "alpaca")


def anchored(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A recipe's values with every path absolute; relative ones are taken from `folder`.

    What is no text is left as it is, for others to refuse.

    >>> anchored({"model": {"path": "base"}, "plugins": ["/a.py"]}, Path("/work"))
    {'model': {'path': '/work/base'}, 'plugins': ['/a.py']}
    >>> anchored({"data": {"path": "hub:openai/gsm8k"}}, Path("/work"))
    {'data': {'path': 'hub:openai/gsm8k'}}
    >>> anchored({"model": {"path": "package:weights/model"}}, Path("/work"))
    {'model': {'path': 'package:weights/model'}}
    """
    made = dict(values)
    for name, section in values.items():
        if isinstance(section, Mapping):
            made[name] = {
                key: _absolute(value, folder) if _is_path(name, key, value) else value
                for key, value in section.items()
            }
    data = made.get("data")
    if isinstance(data, Mapping) and isinstance(data.get("sources"), list | tuple):
        sources = [_source(each, folder) for each in data["sources"]]
        made["data"] = {**data, "sources": sources}
    if isinstance(values.get("plugins"), list | tuple):
        made["plugins"] = [_absolute(plugin, folder) for plugin in values["plugins"]]
    return made


def _source(value: Any, folder: Path) -> Any:
    """One of several sources of data, whose path is its own."""
    if not isinstance(value, Mapping):
        return value
    return {key: _absolute(each, folder) if key == "path" else each for key, each in value.items()}


def _is_path(section: str, key: Any, value: Any) -> bool:
    if key == "chat_template" and value in CHAT_TEMPLATES:
        return False
    if (section, key) == ("model", "path") and str(value).startswith("package:"):
        return False  # a folder of an installed package
    return key == "path" or str(key).endswith("_path") or (section, key) in _OTHERS


def _absolute(value: Any, folder: Path) -> Any:
    if not isinstance(value, str) or not value:
        return value
    if value.startswith("hub:"):
        # A data set of the hub, unless it is a folder like one.
        name, comma, settings = value[4:].partition(",")
        if not name.startswith((".", "/", "~")):
            return value
        return f"hub:{_absolute(name, folder)}{comma}{settings}"
    # Links are not followed: who reads the file says what is wrong with one.
    return os.path.abspath(os.path.join(folder, os.path.expanduser(value)))

"""A griffe extension: the examples in docstrings, which tests run, are shown as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?=\S).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put a fence around every run of lines that begins with `>>>`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a class, function or module as it is read."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(
                lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value
            )

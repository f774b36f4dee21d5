"""Texts out of files that anything may have happened to, as a page can hold them."""

from __future__ import annotations

import re
from typing import Any

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff]")


def visible(text: Any) -> str:
    """Text with what no page can hold (control characters, half characters) made visible."""

    def replace(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(0x2400 + code) if code < 0x20 else "\ufffd"

    return _CONTROLS.sub(replace, str(text).replace("\r\n", "\n"))


def moment(text: Any) -> str:
    """An ISO time to the second, with a space where ISO has its T."""
    match = re.match(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:?\d\d)?", str(text))
    if match is None:
        return visible(text)
    zone = {"Z": " UTC", "+00:00": " UTC", None: ""}.get(match[3], f" {match[3]}")
    return f"{match[1]} {match[2]}{zone}"

"""Errors as OpenAI's clients read them: a status and one object that says what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# What a status means, as clients tell kinds of errors apart.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass
class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        problem: one sentence, with what is allowed in it.
        param: the request's field at fault.
        code: one word that programs can compare.
        headers: more headers of the answer.
    """

    status: int
    problem: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.problem

    def as_json(self) -> dict[str, Any]:
        """The body of the answer.

        >>> ApiError(404, "there is no such page").as_json()["error"]["type"]
        'invalid_request_error'
        """
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, kind)
        known = {"message": self.problem, "type": kind, "param": self.param, "code": self.code}
        return {"error": known}

"""What a request's body may say, after OpenAI's reference: checked, and nothing passed over.

A parameter that would change the answer and is not supported is refused, unless its value says
what happens anyway. Those that change nothing, such as `user`, are taken and not used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from modicum.core.contracts.method import own_words
from modicum.core.errors import InputError, clipped
from modicum.serve.api_error import ApiError

MOST_CHOICES = 16
_UNUSED = ("metadata", "prompt_cache_key", "safety_identifier", "user")
# Not supported, but for values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
Prompt = str | tuple[int, ...]
TokenCount = Annotated[int, Field(ge=1, le=2**31)]
StopWords = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Strict):
    """What a stream has in addition."""

    include_usage: bool = False
    include_obfuscation: bool = False


class AskedBody(_Strict):
    """What both endpoints take."""

    model: str
    max_tokens: TokenCount | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopWords = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _streams(self) -> AskedBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams, and `stream` is not true")
        return self

    @property
    def choices(self) -> int:
        """How many choices are asked for: `n` of each prompt."""
        return self.n

    @property
    def most_tokens(self) -> int | None:
        """The limit of tokens that is asked for; None: the server's."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """How many likely tokens are shown at each place; None: no log-probabilities."""
        return None


class Turn(_Strict):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, value: Any) -> Any:
        """Leave out what says nothing: clients send answers back with all their empty fields."""
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if k == "content" or v not in (None, [], {}, "")}

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        """The text of content in parts."""
        if not isinstance(value, list):
            return value
        for part in value:
            if not isinstance(part, dict) or part.keys() != {"type", "text"}:
                raise ValueError("parts of content are objects with type 'text' and a text")
            if part["type"] != "text" or not isinstance(part["text"], str):
                raise ValueError("the model reads text; other parts of content are not supported")
        return "".join(part["text"] for part in value)


class AskedAnswer(AskedBody):
    """A body of `/v1/chat/completions`."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _agree(self) -> AskedAnswer:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs `logprobs: true`")
        if self.max_tokens and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self

    @property
    def most_tokens(self) -> int | None:
        """The limit of tokens that is asked for; None: the server's."""
        return self.max_tokens or self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        """How many likely tokens are shown at each place; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class AskedText(AskedBody):
    """A body of `/v1/completions`."""

    prompt: list[Prompt]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if all(type(each) is int for each in value):
                return [tuple(value)]
            if all(isinstance(each, str) for each in value):
                return value
            if all(isinstance(each, list) and _are_tokens(each) for each in value):
                return [tuple(each) for each in value]
        raise ValueError("a prompt is a text, a list of token ids, or a list of one of them")

    @property
    def choices(self) -> int:
        """How many choices are asked for: `n` of each prompt."""
        return self.n * len(self.prompt)

    @property
    def most_tokens(self) -> int | None:
        """The limit of tokens that is asked for; OpenAI's own where none is."""
        return self.max_tokens or 16

    @property
    def likeliest(self) -> int | None:
        """How many likely tokens are shown at each place; None: no log-probabilities."""
        return self.logprobs


def parse(body: bytes, kind: type[AskedBody]) -> AskedBody:
    """What a body asks for.

    Raises:
        ApiError: 400, with the parameter at fault.
    """
    values = {name: value for name, value in _object(body).items() if value is not None}
    for name in _UNUSED:
        values.pop(name, None)
    for name in _NEUTRAL.keys() & values.keys() - kind.model_fields.keys():
        if values.pop(name) not in _NEUTRAL[name]:
            problem = f"{name}: this parameter is not supported here"
            raise ApiError(400, problem, name, "unsupported_parameter")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _said(error, kind.model_fields) from None


def _are_tokens(value: Iterable[Any]) -> bool:
    return all(type(each) is int for each in value)


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body holds."""
    try:
        found = json.loads(body, parse_constant=_no_number)
        json.dumps(found, ensure_ascii=False).encode()  # halves of characters are no text
    except (ValueError, RecursionError) as error:
        problem = f"the body is no JSON ({type(error).__name__}: {clipped(str(error), 120)})"
        raise ApiError(400, problem, code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _said(error: ValidationError, known: Iterable[str]) -> ApiError:
    """The first mistake of a body, in one sentence; one in spelling before what it leaves out."""
    found = error.errors(include_url=False)
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    place = ".".join(map(str, first["loc"])) or None
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        said = InputError("unknown parameter", field=place, value=name, candidates=known, word=name)
        return ApiError(400, str(said), place, "unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{place}: it is required", place, "missing_parameter")
    problem = own_words(first["msg"])
    shown = InputError(problem, field=place, value=first["input"])
    if not place:
        shown = InputError(problem)
    return ApiError(400, str(shown), place, "invalid_value")

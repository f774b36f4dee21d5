"""What the rows of a file of examples look like, and what of them is learned.

Five formats are known. `messages` (OpenAI, and `conversations` with the same keys), `sharegpt`
(`from` and `value`) and `alpaca` are conversations, which a chat template writes as text;
`prompt_completion` and `text` are text as it stands.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from modicum.core.errors import InputError
from modicum.data.chat_template import ChatTemplate, Message, TrainOn
from modicum.data.readers import Document, check_text, string_of
from modicum.data.talks import Talk

Format = Literal["text", "messages", "sharegpt", "alpaca", "prompt_completion"]
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
# Of each format but text, the columns that a row must have, and those that it may have.
_COLUMNS: dict[str, tuple[set[str], set[str]]] = {
    "messages": (set(), {"messages", "conversations"}),
    "sharegpt": ({"conversations"}, {"system"}),
    "alpaca": ({"instruction", "output"}, {"input", "system"}),
    "prompt_completion": ({"prompt", "completion"}, set()),
}
# The prompt of Stanford Alpaca, for models that have no chat template.
_ALPACA = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


def format_of(row: Mapping[str, Any]) -> Format:
    """The format of a row, by its columns: `text` where they are those of no other."""
    if isinstance(row.get("messages"), list):
        return "messages"
    turns = row.get("conversations")
    if isinstance(turns, list) and turns and isinstance(turns[0], dict):
        return "sharegpt" if "from" in turns[0] else "messages"
    if "instruction" in row and "output" in row:
        return "alpaca"
    if "prompt" in row and "completion" in row:
        return "prompt_completion"
    return "text"


@dataclass(frozen=True)
class RowFormat:
    """How rows become documents.

    Args:
        name: the format.
        template: what writes conversations; Alpaca has a plain prompt of its own without one.
        train_on: all turns of the assistant, or the last.
        column, prompt_column: of the format `text`.
    """

    name: Format = "text"
    template: ChatTemplate | None = None
    train_on: TrainOn = "all"
    column: str = "text"
    prompt_column: str | None = None

    @property
    def conversations(self) -> bool:
        """Whether a template writes the rows."""
        talks = self.name in ("messages", "sharegpt", "alpaca")
        return talks and self.template is not None

    @property
    def identity(self) -> list[str | None]:
        """All that decides what a row becomes."""
        if self.name == "text":
            return [self.name, self.column, self.prompt_column]
        digest = None if self.template is None else self.template.digest
        return [self.name, digest, self.train_on]

    @property
    def dated(self) -> bool:
        """Whether a template that may write the date writes rows."""
        return self.name != "text" and self.template is not None and self.template.dated

    def written_at(self, now: datetime) -> RowFormat:
        """The same, with this date and time in what a template writes."""
        template = None if self.template is None else replace(self.template, now=now)
        return replace(self, template=template)

    def without_tools(self) -> RowFormat:
        """The same for rows that come without tools, which a template for these does not write."""
        template = None if self.template is None else replace(self.template, tool_use=None)
        return replace(self, template=template)

    def used(self, names: Collection[str]) -> set[str] | None:
        """Of the columns of a file, those that are read.

        None: all, as one is missing that must be there; so the refusal names those that are.

        >>> sorted(RowFormat("alpaca").used(["id", "instruction", "input", "output"]))
        ['input', 'instruction', 'output']
        """
        if self.name == "text":
            asked = {self.column, self.prompt_column or self.column}
            return asked if asked.issubset(names) else None
        needed, may = _COLUMNS[self.name]
        found = (needed | may) & set(names)
        return found | ({"tools"} & set(names)) if found and needed.issubset(names) else None

    def describe(self) -> str:
        """What is read of each row, for people."""
        if self.name != "text":
            return f"format {self.name!r}"
        after = f" after {self.prompt_column!r}" if self.prompt_column else ""
        return f"column {self.column!r}{after}"

    def document(self, row: Mapping[str, Any], origin: str, size: int) -> Document:
        """The document that a row holds.

        Raises:
            InputError: a column is missing or of another type, or the template refuses the turns.
        """
        if self.name == "text":
            prompt = None if self.prompt_column is None else string_of(row, self.prompt_column)
            return Document(string_of(row, self.column), prompt, origin, size)
        if self.name == "prompt_completion" and not isinstance(row.get("prompt"), list):
            text = string_of(row, "completion")
            return Document(text, string_of(row, "prompt"), origin, size)
        if self.name == "alpaca" and self.template is None:
            return Document(string_of(row, "output"), _alpaca_prompt(row), origin, size)
        if self.template is None:
            raise InputError(
                f"rows of the format {self.name!r} are written by a chat template, and the "
                "tokenizer has none; name a file with one in data.chat_template",
                field="data.chat_template",
            )
        tools = _parsed(row.get("tools"))
        first = len(_turns(row, "prompt")) if self.name == "prompt_completion" else 0
        talk = Talk(self.template, self._messages(row), tools, self.train_on, first)
        text, spans = talk.written()
        return Document(check_text(text), None, origin, size, tuple(spans), talk)

    def _messages(self, row: Mapping[str, Any]) -> list[Message]:
        if self.name == "alpaca":
            asked = string_of(row, "instruction")
            if row.get("input"):
                asked += "\n\n" + string_of(row, "input")
            answer = string_of(row, "output")
            return [*_system(row), _message("user", asked), _message("assistant", answer)]
        if self.name == "prompt_completion":
            return [_checked(turn) for key in ("prompt", "completion") for turn in _turns(row, key)]
        if self.name == "sharegpt":
            return [*_system(row), *(_from_sharegpt(turn) for turn in _turns(row, "conversations"))]
        column = "messages" if "messages" in row else "conversations"
        return [_checked(turn) for turn in _turns(row, column)]


def _alpaca_prompt(row: Mapping[str, Any]) -> str:
    asked, context = string_of(row, "instruction"), ""
    if row.get("input"):
        context = f"### Input:\n{string_of(row, 'input')}\n\n"
    more = ", paired with an input that provides further context" if context else ""
    return _ALPACA.format(more=more, instruction=asked, input=context)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _system(row: Mapping[str, Any]) -> list[Message]:
    return [_message("system", string_of(row, "system"))] if row.get("system") else []


def _turns(row: Mapping[str, Any], column: str) -> list[Any]:
    turns = row.get(column)
    if not isinstance(turns, list) or not turns:
        raise InputError(
            "holds no list of turns", field=column, value=turns, allowed="a list of objects"
        )
    return turns


def _checked(turn: Any) -> Message:
    """A turn with role and content; parts of text are joined.

    Raises:
        InputError: it has no role, or content that is no text.
    """
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise InputError("a turn has no role", value=turn, allowed='{"role": ..., "content": ...}')
    content = turn.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise InputError("a turn holds more than text", field="content", value=content)
        return {**turn, "content": "".join(string_of(part, "text") for part in content)}
    if content is None and turn.get("tool_calls"):
        return {**turn, "content": ""}
    if not isinstance(content, str):
        raise InputError("a turn's content is no text", field="content", value=content)
    return turn


def _from_sharegpt(turn: Any) -> Message:
    if not isinstance(turn, dict) or "from" not in turn:
        raise InputError("a turn has no `from`", value=turn, allowed='{"from": ..., "value": ...}')
    role = _ROLES.get(str(turn["from"]))
    if role is None:
        raise InputError(
            "a turn is from somebody unknown",
            field="from",
            value=turn["from"],
            allowed=", ".join(_ROLES),
            candidates=_ROLES,
        )
    return _message(role, string_of(turn, "value"))


def _parsed(tools: Any) -> Any:
    """The tools of a row: a list, or one as JSON text, as hubs store it."""
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools) if tools.strip() else None
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not valid JSON: {error}", field="tools") from error

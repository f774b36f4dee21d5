"""A model's chat template: messages to text, and which characters of it are to be learned.

Templates are Jinja, as `transformers` has them, and come with models that strangers made; they run
in Jinja's sandbox and see plain values only.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

from modicum.core.errors import InputError

Message = Mapping[str, Any]
Span = tuple[int, int]
TrainOn = Literal["all", "last"]
_DATE = "strftime_now"  # what writes the date in templates
_DEFAULT, _TOOLS = "default", "tool_use"  # what transformers calls a model's several templates
_FILE, _CONFIGURATION = "chat_template.jinja", "tokenizer_config.json"
TOOL_FILE = f"additional_chat_templates/{_TOOLS}.jinja"
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # what models call them in a message
# What `{% generation %}` puts around the text that the assistant generates; no message has it.
_BEGIN, _END = (f"\0{secrets.token_hex(8)}{side}" for side in "<>")


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the special tokens that it may name.

    Args:
        source: the Jinja text.
        tokens: `bos_token`, `eos_token` and so on.
        special: the special tokens that it writes, which a tokenizer trained for it has.
        now: the date and time that it may write; None: when it writes.
        tool_use: the Jinja text for conversations with tools; None: `source`.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    >>> asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    >>> template.conversation(asked)
    ('<user>Hi<assistant>Yes?', [(8, 23)])
    """

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    special: tuple[str, ...] = ()
    now: datetime | None = None
    tool_use: str | None = None

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of all that decides what it writes, but for the date."""
        more = [] if self.tool_use is None else [self.tool_use]
        text = json.dumps([self.source, dict(self.tokens), *more], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def dated(self) -> bool:
        """Whether it may write the date."""
        return _DATE in self.source or _DATE in (self.tool_use or "")

    def render(
        self, messages: Sequence[Message], *, tools: Any = None, generation: bool = False
    ) -> str:
        """The text of messages; with `generation`, up to where the assistant begins to answer.

        Raises:
            InputError: the template does not take these messages; with its own words.
        """
        return self._marked(messages, tools, generation).replace(_BEGIN, "").replace(_END, "")

    def conversation(
        self,
        messages: Sequence[Message],
        *,
        tools: Any = None,
        train_on: TrainOn = "all",
        first: int = 0,
    ) -> tuple[str, list[Span]]:
        """The text of a conversation, and the characters [start, end) that the assistant writes.

        A template with `{% generation %}` says itself which these are. Of any other, a turn is what
        its message adds to the text, without what stands there when the assistant is asked.

        Args:
            first: the turns before this one are a prompt, of which nothing is learned.

        Raises:
            InputError: the template does not take these messages, or writes earlier turns in
                another way when later ones follow.
        """
        marked = self._marked(messages, tools, generation=False)
        if _BEGIN in marked:
            text, found = _unmarked(marked)
            if any(message.get("role") == "assistant" for message in messages[:first]):
                begin = _shared(self.render(messages[:first], tools=tools), text)
                found = [span for span in found if span[0] >= begin]
            return text, found if train_on == "all" else found[-1:]
        roles = [message.get("role") for message in messages]
        turns = [n for n, role in enumerate(roles) if n >= first and role == "assistant"]
        if train_on == "last":
            turns = turns[-1:]
        spans: list[Span] = []
        for number in turns:
            spans.append(self._turn(messages, number, tools, marked, spans[-1][1] if spans else 0))
        return marked, spans

    def _turn(
        self, messages: Sequence[Message], number: int, tools: Any, text: str, after: int
    ) -> Span:
        """Where the turn of one message stands in the full text, not before place `after`."""
        through = text
        if number + 1 < len(messages):
            through = self.render(messages[: number + 1], tools=tools)
            if not text.startswith(through):  # some close the last turn alone with an end of text
                through = through.removesuffix(self.tokens.get("eos_token", ""))
        if number:
            # A generation prompt may hold more than the turn begins with, such as an empty thought.
            start = _shared(self.render(messages[:number], tools=tools, generation=True), text)
        else:
            start = self._first_words(messages, tools, text)
        if not text.startswith(through) or not after <= start < len(through):
            raise InputError(
                "the chat template writes an earlier turn in another way when later ones follow, "
                "so what the assistant would write there is not in the text; train on the last "
                "turn alone (data.train_on: last), or give a template that has "
                "{% generation %} around what the assistant writes",
                field="data.train_on",
            )
        return start, len(through)

    def _first_words(self, messages: Sequence[Message], tools: Any, text: str) -> int:
        """Where the first message's own words begin: from there on other ones are another text.

        No messages come before them with which a generation prompt could be written.
        """
        other = {key: value for key, value in messages[0].items() if key not in _THOUGHTS}
        start = _shared(self.render([other | {"content": "\0"}, *messages[1:]], tools=tools), text)
        return start if start < len(text) else 0  # the template writes no content of this message

    def _marked(self, messages: Sequence[Message], tools: Any, generation: bool) -> str:
        compiled = self._compiled_for_tools if tools else self._compiled
        try:
            rendered: str = compiled.render(
                messages=json.loads(json.dumps(list(messages))),
                tools=tools or None,
                documents=None,
                add_generation_prompt=generation,
                **self.tokens,
            )
        except Exception as error:  # a template is somebody's program, and may fail in any way
            said = str(error) or type(error).__name__
            raise InputError(f"the chat template does not take these messages: {said}") from error
        return rendered

    @cached_property
    def _compiled(self) -> Any:
        return _compile(self.source, self.now)

    @cached_property
    def _compiled_for_tools(self) -> Any:
        return self._compiled if self.tool_use is None else _compile(self.tool_use, self.now)


def own_template(
    texts: Mapping[str, str], tokens: Mapping[str, str] | None = None
) -> ChatTemplate | None:
    """The template of a tokenizer, out of the texts of the files next to it; None: it has none.

    Args:
        tokens: the special tokens that it may name; None: those that the files spell.

    Raises:
        InputError: there are several, and none is called `default`.
    """
    named = _templates(texts)
    source, tool_use = named.get(_DEFAULT), named.get(_TOOLS)
    if named and source is None:
        raise InputError(
            "the tokenizer has several chat templates and none called 'default'; name a file "
            "with the one that is meant",
            field="data.chat_template",
            allowed=", ".join(named),
        )
    if not isinstance(source, str):
        return None
    known = special_tokens(texts) if tokens is None else tokens
    return ChatTemplate(source, known, tool_use=tool_use if isinstance(tool_use, str) else None)


def flattened(texts: Mapping[str, str]) -> dict[str, str]:
    """The texts with the template of `TOOL_FILE` in a list of tokenizer_config.json.

    `transformers` reads it there too, and all files of a tokenizer stand in one folder.
    """
    found, named = dict(texts), _templates(texts)
    tool_use = found.pop(TOOL_FILE, None)
    if tool_use is None or _DEFAULT not in named:
        return found
    found.pop(_FILE, None)  # where it is, no list is read
    every = (named | {_TOOLS: tool_use}).items()
    configuration = json.loads(found.get(_CONFIGURATION, "{}"))
    configuration["chat_template"] = [{"name": name, "template": text} for name, text in every]
    return found | {_CONFIGURATION: json.dumps(configuration, indent=2) + "\n"}


def special_tokens(texts: Mapping[str, str]) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on, out of the texts of the files next to a tokenizer."""
    found = {}
    for file in ("special_tokens_map.json", _CONFIGURATION):
        for name, value in json.loads(texts.get(file, "{}")).items():
            word = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(word, str):
                found[name] = word
    return found


def _templates(texts: Mapping[str, str]) -> dict[str, Any]:
    """What the files next to a tokenizer have as templates, by their names."""
    configuration = json.loads(texts.get(_CONFIGURATION, "{}"))
    source = texts.get(_FILE, configuration.get("chat_template"))
    if isinstance(source, list):
        known = (each for each in source if isinstance(each, dict))
        return {str(each.get("name")): each.get("template") for each in known}
    return {} if source is None else {_DEFAULT: source}


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    if other.startswith(one):
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _unmarked(marked: str) -> tuple[str, list[Span]]:
    """The text without its marks, and the spans between them."""
    text, spans, start = "", [], 0
    for piece in re.split(f"({re.escape(_BEGIN)}|{re.escape(_END)})", marked):
        if piece == _BEGIN:
            start = len(text)
        elif piece == _END:
            spans.append((start, len(text)))
        else:
            text += piece
    return text, spans


def _compile(source: str, now: datetime | None) -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise InputError(
            "jinja2 is not installed, and chat templates need it: pip install modicum[cli]"
        ) from error
    try:
        return _environment(now).from_string(source)
    except jinja2.TemplateError as error:
        raise InputError(f"this is no chat template: {error}") from error


def _environment(now: datetime | None) -> Any:
    """Jinja as `transformers` sets it up for templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` ... `{% endgeneration %}`: what the assistant writes."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_around", [])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _around(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def refuse(message: str) -> None:
        raise TemplateError(message)

    # Of the options of `json.dumps` those that `transformers` has: others name what is called.
    def as_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        how: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals[_DATE] = lambda form: (now or datetime.now()).strftime(form)
    return environment

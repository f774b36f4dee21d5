"""A recipe in the making: settings, each with its reason, and what only its user can know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from modicum.core.errors import InputError
from modicum.recipe import Recipe, assign

ASKED_FOR = "as asked for"


def fields_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for by dotted name, where a section may be given with all that it has.

    >>> fields_of({"adapter": {"method": "lora"}, "data.format": "chat"})
    {'adapter.method': 'lora', 'data.format': 'chat'}
    """
    found: dict[str, Any] = {}
    for name, value in asked.items():
        inner = value if "." not in name and isinstance(value, Mapping) else None
        found |= {f"{name}.{key}": each for key, each in inner.items()} if inner else {name: value}
    return found


@dataclass(frozen=True)
class Setting:
    """A field of a recipe, its value, and why it has that value."""

    field: str
    value: Any
    why: str


@dataclass(frozen=True)
class OpenQuestion:
    """What cannot be seen in model and data.

    Args:
        field: of the recipe, which the answer is for.
        text: the question, in a few words.
        default: the answer where nobody gives one.
        choices: the answers that are allowed; empty: any that the field allows.
    """

    field: str
    text: str
    default: Any
    choices: tuple[str, ...] = ()

    def check(self, answer: Any) -> Any:
        """The answer, if it is one.

        Raises:
            InputError: it is none of the choices, or nothing that the field allows.
        """
        if answer in self.choices:
            return answer
        if self.choices:
            raise InputError(
                "is none of the answers",
                field=self.field,
                value=answer,
                allowed=", ".join(self.choices),
                candidates=self.choices,
            )
        values: dict[str, Any] = {}
        if self.field.startswith("task."):  # whose fields are checked with its name
            values["task"] = {"method": "text_classes"}
        assign(values, self.field, answer)
        Recipe(**values)
        return answer


Ask = Callable[[OpenQuestion], Any]


def take_default(question: OpenQuestion) -> Any:
    """The answer of nobody."""
    return question.default


@dataclass
class Draft:
    """Settings in the order in which they were found; those that are asked for win.

    Args:
        asked: fields, dotted, and their values.
        ask: gives the answer to a question.
    """

    asked: Mapping[str, Any] = field(default_factory=dict)
    ask: Ask = take_default
    settings: dict[str, Setting] = field(default_factory=dict)
    questions: list[OpenQuestion] = field(default_factory=list)

    def set(self, name: str, value: Any, why: str) -> Any:
        """Give a field its value, unless another one is asked for; the value that it has."""
        if name in self.asked:
            value, why = self.asked[name], ASKED_FOR
        self.settings[name] = Setting(name, value, why)
        return value

    def question(self, question: OpenQuestion, why: str) -> Any:
        """Give a field what is asked for, else the answer to a question; the value that it has.

        Raises:
            InputError: the answer is not allowed.
        """
        if question.field in self.asked:
            return self.set(question.field, None, why)
        self.questions.append(question)
        answer = self.ask(question)
        if answer != question.default:
            question.check(answer)
            why = "as answered"
        return self.set(question.field, answer, why)

    def has(self, name: str) -> bool:
        """Whether a field was set, or is asked for."""
        return name in self.settings or name in self.asked

    def take_asked(self) -> None:
        """Add what is asked for and was not come by."""
        for name in self.asked:
            if name not in self.settings:
                self.set(name, None, ASKED_FOR)

    def drop(self, section: str) -> None:
        """Forget a section, but for what is asked for."""
        for name in list(self.settings):
            if name.partition(".")[0] == section and name not in self.asked:
                del self.settings[name]

    def recipe(self, **more: Any) -> Recipe:
        """The recipe so far, with what was asked for.

        Args:
            more: other fields, with `__` for the dot, that are set for now.

        Raises:
            InputError: it is no valid recipe.
        """
        values: dict[str, Any] = {}
        later = {name.replace("__", "."): value for name, value in more.items()}
        found = {name: setting.value for name, setting in self.settings.items()}
        for name, value in {**found, **self.asked, **later}.items():
            assign(values, name, value)
        return Recipe(**values)

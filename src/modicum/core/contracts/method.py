"""What a method is: a frozen value with plain hyper-parameters, and what is said about it.

Nothing here imports torch. The catalog reads `info`, fields, defaults and bounds from the syntax
tree of a method's file, so `info` is made of literals and field types come from this module,
`typing` or `pydantic`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    Self,
    get_args,
    runtime_checkable,
)

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from modicum.core.contracts.search import SearchTable
from modicum.core.contracts.traits import TRAITS
from modicum.core.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from modicum.core.contracts.ledger import Ledger
    from modicum.core.contracts.step import StepContext, StepProgram

Evidence = Literal["verified against code", "against paper", "reconstructed"]
# From the worst to the best; the first where no proof has measured it.
ClaimVerdict = Literal["not shown here", "does not hold", "in part", "holds"]
AgainstResult = Literal["not shown here", "worse", "equal", "better", "baseline"]
Verdict = Literal["holds", "does not hold", "not shown here"]

RUN_ON_GPU, NOT_ON_GPU = "run on GPU", "not yet run on GPU"

# Field types that methods share. Strings and lists from YAML become tuples; nothing else is
# converted: a method's value is what the user wrote.
PositiveInt = Annotated[int, Field(ge=1)]
PowerIterations = Annotated[int, Field(ge=1, le=1000)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Betas = Annotated[tuple[Probability, Probability], Field(strict=False)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]
# A count that goes from one to another in so many updates: see `by_step.ByStep`.
CountByStep = Annotated[tuple[PositiveInt, PositiveInt, PositiveInt], Field(strict=False)]
# That branch of a union as pydantic names it, and what the union takes.
_BY_STEP = "tuple[constrained-int, constrained-int, constrained-int]"
_BY_STEP_ALLOWED = "an integer of at least 1, or [first, last, updates], each at least 1"
# (a, b, c) of a x + b x^3 + c x^5.
_Coefficient = Annotated[float, Field(allow_inf_nan=False)]
OddQuintic = Annotated[tuple[_Coefficient, _Coefficient, _Coefficient], Field(strict=False)]
# What torch's own generators take.
LARGEST_SEED = 2**63 - 1
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


def _known_word(word: str, kind: Any, field: str) -> None:
    """Refuse what is none of a literal's words."""
    known = get_args(kind)
    if word not in known:
        problem, allowed = "not one of the known words", ", ".join(known)
        raise InputError(problem, field=field, value=word, allowed=allowed, candidates=known)


@dataclass(frozen=True)
class Against:
    """How a method stands against the best simple alternative at equal budget.

    Args:
        rival: which that is; nothing for a baseline, which others are measured against.
    """

    result: AgainstResult = "not shown here"
    rival: str = ""

    def __post_init__(self) -> None:
        _known_word(self.result, AgainstResult, "against.result")
        if bool(self.rival) != (self.result in ("worse", "equal", "better")):
            problem = "names a rival where one was measured, and there alone"
            raise InputError(problem, field="against.rival", value=self.rival)

    def __str__(self) -> str:
        link = {"better": " than ", "worse": " than ", "equal": " to "}.get(self.result, "")
        return f"{self.result}{link}{self.rival}"


def verdict_of(claim_verdict: ClaimVerdict, against: Against) -> Verdict:
    """Both parts in one word: `holds` where the claim does and no simple alternative is better.

    >>> verdict_of("holds", Against("equal", "LoRA")), verdict_of("holds", Against("worse", "LoRA"))
    ('holds', 'does not hold')
    """
    if claim_verdict == "not shown here":
        return "not shown here"
    stands = claim_verdict == "holds" and against.result != "worse"
    return "holds" if stands else "does not hold"


@dataclass(frozen=True)
class Info:
    """What the catalog says of a method, all of it literals.

    Args:
        name: the catalog name, which is also the file's.
        title: one line for people.
        room: the room it belongs to.
        paper: authors' title and arXiv id.
        claim: the paper's headline, in one sentence.
        traits: words of `modicum.core.contracts.traits.TRAITS`; they decide what it combines with.
        traits_if: triples (field, value, trait): traits that it has where a field has a value.
        traits_unless: (field, value, other, trait): traits that it has unless a field has a value;
            `other` is one with which it has it.
        excludes: pairs (trait, sentence): what it does not combine with for a reason of its own;
            the sentence is the error message. What holds for others too belongs into the table of
            `traits.py`.
        slot: the recipe's section in which it stands, where that is not its room's own.
        tiny: hyper-parameters for models of a few thousand parameters, with layers as narrow as 5,
            and for runs of a few steps. Batteries, combinations and the drill use them.
        evidence: how the implementation was checked.
        claim_verdict: whether the proof found the claim here, as far as it can be shown here.
        against: how the method stood against the best simple alternative at equal budget.
        reason: why the two are what they are, where the claim does not hold or nothing is better.
        run_on_gpu: whether it has been run on an accelerator.
    """

    name: str
    title: str
    room: str
    paper: str
    claim: str
    traits: tuple[str, ...] = ()
    evidence: Evidence = "reconstructed"
    claim_verdict: ClaimVerdict = "not shown here"
    against: Against = Against()
    reason: str = ""
    run_on_gpu: bool = False
    slot: str = ""
    traits_if: tuple[tuple[str, Any, str], ...] = ()
    traits_unless: tuple[tuple[str, Any, Any, str], ...] = ()
    tiny: Mapping[str, Any] = field(default_factory=dict, hash=False)
    excludes: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        sometimes = (triple[-1] for triple in (*self.traits_if, *self.traits_unless))
        named = (*self.traits, *sometimes, *(t for t, _ in self.excludes))
        unknown = set(named) - TRAITS.keys()
        if unknown:
            word = min(unknown)
            raise InputError("unknown trait", field="traits", value=word, candidates=TRAITS)
        _known_word(self.claim_verdict, ClaimVerdict, "claim_verdict")

    def traits_of(self, fields: Mapping[str, Any]) -> frozenset[str]:
        """The traits of a value whose fields these are.

        >>> info = Info("a", "A", "optim", "", "", traits_if=(("deep", True, "defers_update"),))
        >>> sorted(info.traits_of({"deep": True})), sorted(info.traits_of({"deep": False}))
        (['defers_update'], [])
        """
        there = [trait for name, value, trait in self.traits_if if fields.get(name) == value]
        for name, value, _, trait in self.traits_unless:
            if name in fields and fields[name] != value:
                there.append(trait)
        return frozenset((*self.traits, *there))

    @property
    def with_other_traits(self) -> tuple[tuple[str, Any], ...]:
        """Fields and values with which it has another trait, each once.

        >>> unless = (("penalty", 0, 0.1, "follows_steps"),)
        >>> Info("a", "A", "adapters", "", "", traits_unless=unless).with_other_traits
        (('penalty', 0.1),)
        """
        unless = (each[:3:2] for each in self.traits_unless)
        return tuple(dict.fromkeys((*(each[:2] for each in self.traits_if), *unless)))

    @property
    def verdict(self) -> Verdict:
        """Both parts of the verdict in one word."""
        return verdict_of(self.claim_verdict, self.against)

    @property
    def status(self) -> str:
        """The honest state of the method in one line."""
        claim = {"in part": "claim holds in part"}.get(
            self.claim_verdict, f"claim {self.claim_verdict}"
        )
        unmeasured = self.against.result == "not shown here"
        found = claim if unmeasured else f"{claim}; {self.against}"
        reason = f" ({self.reason})" if self.reason else ""
        gpu = RUN_ON_GPU if self.run_on_gpu else NOT_ON_GPU
        return f"{self.evidence}; {found}{reason}; {gpu}"


def _unnamed(name: str, fields: Iterable[str], value: Any) -> InputError:
    """The refusal of a value without its field's name: of many fields none is the first."""
    known = list(fields)
    field = "rank" if "rank" in known else next(iter(known), None)
    such = "" if field is None else f", as in {name}({field}=...)"
    return InputError(f"{name} takes its fields by name{such}", value=value)


@runtime_checkable
class Runtime(Protocol):
    """What `bind` makes: it owns all state, and gives it back."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Context:
    """What a method is bound to: the model, and the run's seed."""

    model: nn.Module
    seed: int = 0


class Method(BaseModel):
    """A method's value: frozen, validated, plain. Subclasses add fields and `bind`.

    Raises:
        InputError: a field is unknown, without its name, of the wrong type or out of bounds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    info: ClassVar[Info]
    # What may be tuned of it; None: what its room says of all its methods.
    search: ClassVar[SearchTable | None] = None

    def __init__(self, *unnamed: Any, **fields: Any) -> None:
        if unnamed:
            raise _unnamed(type(self).__name__, type(self).model_fields, unnamed[0])
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise describe(error, type(self).model_fields, prefix="") from None

    @classmethod
    def tiny(cls, **fields: Any) -> Self:
        """A value for small models and short runs, with `fields` set."""
        return cls(**{**cls.info.tiny, **fields})

    @property
    def traits(self) -> frozenset[str]:
        """What this value does to a run, in words of `modicum.core.contracts.traits.TRAITS`."""
        return self.info.traits_of({name: getattr(self, name) for name in type(self).model_fields})

    def bind(self, context: Any) -> Runtime:
        """Make the runtime object that does the work; `context` is the room's."""
        raise TypeError(f"{type(self).__name__} defines no bind()")

    def bind_step(self, context: StepContext) -> StepProgram:
        """Make the program of a run's updates; methods of the section `optimizer` do.

        Raises:
            InputError: the recipe asks for what means nothing to it, such as a clip of gradients
                that it does not have.
        """
        raise TypeError(f"{type(self).__name__} defines no bind_step()")

    def run_hook(self, bound: Any) -> object:
        """What takes part in a run of what the method is bound to (`core.contracts.run_hooks`).

        That is a `RunHook`; anything else does not. Most often it is `bound` itself; a
        compressor is given the model that holds what it made, a linear form that model, what is
        trained of it, and the ranks.
        """
        return bound

    def ledger(self, at: Any) -> Ledger:
        """What the method spends at a site, by arithmetic, before anything runs."""
        raise TypeError(f"{type(self).__name__} defines no ledger()")


def describe(
    failure: ValidationError, known: Iterable[str], *, prefix: str, **where: Any
) -> InputError:
    """The first of pydantic's complaints as one message about one field of modicum's."""
    errors = failure.errors()
    error = errors[0]
    path = _path(error)
    words = [e for e in errors if e["type"] == "literal_error" and _path(e) == path]
    if words and isinstance(error["input"], str):
        error = words[0]  # of a number or a word, somebody who wrote a word meant the word
    field = (prefix + ".".join(map(str, path))).rstrip(".")
    union = (*error["loc"][:-1], _BY_STEP)
    if isinstance(error["input"], list | tuple) and any(
        e["loc"][: len(union)] == union for e in errors
    ):
        problem, value = "not one of the known forms", error["input"]
        return InputError(problem, field=field, value=value, allowed=_BY_STEP_ALLOWED, **where)
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        word = str(error["loc"][-1])
        field = field if path and path[-1] == word else f"{field}.{word}".lstrip(".")
        return InputError(
            "unknown key",
            field=field,
            word=word,
            candidates=known,
            allowed=", ".join(sorted(known)),
            **where,
        )
    if kind == "missing":
        return InputError("this field is needed", field=field, **where)
    if kind == "literal_error":
        expected = str(context["expected"])
        return InputError(
            "not one of the known words",
            field=field,
            value=error["input"],
            allowed=expected,
            candidates=expected.replace("'", "").replace(" or ", ", ").split(", "),
            **where,
        )
    if kind == "value_error":
        return InputError(own_words(error["msg"]), field=field, value=error["input"], **where)
    problem = _PROBLEMS.get(kind) or own_words(error["msg"])
    bounds = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    allowed = "; ".join(f"{bounds[k]} {v}" for k, v in context.items() if k in bounds)
    return InputError(problem, field=field, value=error["input"], allowed=allowed or None, **where)


def own_words(message: str) -> str:
    """A message of pydantic's without what it says of itself.

    >>> own_words("Value error, 'x' is no colour"), own_words("Input should be a multiple of 32")
    ("'x' is no colour", 'must be a multiple of 32')
    >>> own_words("List should have at least 1 item after validation, not 0")
    'list must have at least 1 item, not 0'
    """
    for before in ("Value error, ", "Assertion failed, "):
        message = message.removeprefix(before)
    if message.startswith("Input should "):
        message = message.replace("Input should ", "must ", 1)
    message = message.replace(" should have ", " must have ", 1).replace(" after validation", "")
    return message[:1].lower() + message[1:]


def _path(error: ErrorDetails) -> list[int | str]:
    """The field an error is about, without the branch of a union that pydantic tried."""
    parts = [part for part in error["loc"] if isinstance(part, int) or str(part).isidentifier()]
    while len(parts) > 1 and parts[-1] in _BRANCHES:
        parts.pop()
    return parts


_BRANCHES = {"int", "float", "str", "bool", "tuple", "constrained"}
NO_SECTION = "expected a section with keys"
_PROBLEMS = {
    "int_type": "expected an integer",
    "int_parsing": "expected an integer",
    "int_parsing_size": "too large",
    "int_from_float": "expected an integer",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "tuple_type": "expected a list",
    "model_type": NO_SECTION,
    "dict_type": NO_SECTION,
    "greater_than_equal": "too small",
    "greater_than": "too small",
    "less_than_equal": "too large",
    "less_than": "too large",
    "finite_number": "must be a finite number",
    "too_short": "the list is too short",
}

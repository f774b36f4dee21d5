"""Which adapters a conversation's model has, changed by name between answers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from modicum.core.errors import InputError
from modicum.serve.conversation import Conversation
from modicum.serve.loading import load_served
from modicum.serve.served_models import ServedModels


@dataclass
class AdapterChoice:
    """The adapters of a model by name, and which of them a conversation uses.

    Attributes:
        used: the weight of each that is in use, by name; a name without an adapter is the base's.

    Args:
        plain: text is continued, whatever templates there are.
    """

    conversation: Conversation
    served: ServedModels
    plain: bool = False
    used: dict[str, float] = field(default_factory=dict)

    @classmethod
    def loaded(
        cls,
        run: str | Path,
        adapters: dict[str, Path],
        *,
        plain: bool = False,
        trust_remote_code: bool = False,
    ) -> AdapterChoice:
        """What a run made with more adapters of its base; its own is in use, else the first.

        Raises:
            InputError: as `load_served`.
        """
        served = load_served(run, adapters, trust_remote_code=trust_remote_code)
        conversation = Conversation(served.model, served.tokenizer, more_ends=served.ends)
        choice = cls(conversation, served, plain)
        with_one = [name for name, each in served.names.items() if each.adapter is not None]
        choice.use(with_one[:1])
        return choice

    def use(self, words: Iterable[str]) -> None:
        """Use these adapters, each NAME or NAME=WEIGHT, and no other: their changes add up.

        The conversation's template is that of the first, and its texts end as those of any of them
        do. What was in use stays so where this fails.

        Raises:
            InputError: no adapter has the name, one is named twice, a weight is no finite number,
                or these do not go together.
        """
        chosen = self._read(words)
        before = self.used
        try:
            self._activate(chosen)
        except InputError:
            self._activate(before)
            raise
        template = self.served.names[next(iter(chosen))].template
        self.conversation.template = None if self.plain else template
        ends = (self.served.names[name].ends for name in chosen)
        self.conversation.more_ends = self.served.ends.union(*ends)

    def _activate(self, chosen: dict[str, float]) -> None:
        for adapter in self.served.adapters.values():
            adapter.deactivate()
        for name, weight in chosen.items():
            own = self.served.names[name].adapter
            if own is not None:
                self.served.adapters[own].activate(weight, alone=False)
        self.used = chosen

    def _read(self, words: Iterable[str]) -> dict[str, float]:
        chosen: dict[str, float] = {}
        for word in words:
            name, given, number = word.partition("=")
            if name not in self.served.names:
                raise InputError(
                    "no adapter has this name",
                    value=name,
                    allowed=", ".join(self.served.names),
                    candidates=list(self.served.names),
                )
            try:
                weight = float(number) if given else 1.0
            except ValueError:
                weight = math.nan
            if not math.isfinite(weight):
                raise InputError("is no weight: say NAME or NAME=0.7", value=word)
            if name in chosen:
                raise InputError("is named twice", value=name)
            chosen[name] = weight
        if not chosen:
            raise InputError("name an adapter", allowed=", ".join(self.served.names))
        return chosen

    def __str__(self) -> str:
        """The names, those in use with a star and their weight.

        A weight of 1 is not said.
        """
        shown = []
        for name in self.served.names:
            weight = self.used.get(name)
            said = "" if weight is None else "*" if weight == 1 else f"*{weight:g}"
            shown.append(f"{name}{said}")
        return "  ".join(shown)

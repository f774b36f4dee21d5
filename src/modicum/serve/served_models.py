"""The models that one server answers with: a base, and adapters on it, under their names."""

from __future__ import annotations

from dataclasses import dataclass, field

from modicum.adapters import AttachedAdapter
from modicum.data.chat_template import ChatTemplate
from modicum.data.tokenizer import Tokenizer
from modicum.models.decoders import Decoder, config_of


@dataclass(frozen=True)
class ServedModel:
    """What a name in a request means.

    Args:
        adapter: the engine's name of the adapter that is active; None: none is.
        template: what writes conversations; None: it continues text only.
        ends: more tokens that end its texts, of its own tokenizer.
    """

    adapter: str | None = None
    template: ChatTemplate | None = None
    ends: frozenset[int] = frozenset()


@dataclass
class ServedModels:
    """One model in memory, and what requests can ask of it by name.

    Args:
        names: the served models; the first is what a run made.
        adapters: adapters on the model, by the engine's names.
        ends: tokens that end a text, whichever model writes it.
    """

    model: Decoder
    tokenizer: Tokenizer
    names: dict[str, ServedModel]
    adapters: dict[str, AttachedAdapter] = field(default_factory=dict)
    ends: frozenset[int] = frozenset()

    @property
    def context(self) -> int:
        """The longest sequence, prompt and answer, in tokens."""
        return config_of(self.model).context

    @property
    def vocabulary_size(self) -> int:
        """How many tokens the model knows."""
        return config_of(self.model).vocabulary_size

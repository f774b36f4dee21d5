"""What a decoder of transformers is built from: its config.json as it stands, and forms."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from modicum.core.layers.form_plan import FormPlan
from modicum.models.transformers.kinds import HeadKind, architecture, described
from modicum.models.transformers.rope_limits import RopeLimits

# Where a config.json says the longest sequence; attention without positions of its own has no end.
_CONTEXTS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length")
_ENDLESS = 2**20
Packing = Literal["none", "positions", "mask"]


@dataclass(frozen=True)
class TransformersShape:
    """All that decides the parameters and the arithmetic of a model of transformers.

    Args:
        raw: what its config.json holds.
        forms: which form linear layers take, by full name.
        packing: what the model gets of documents that share a row, so that each is computed as it
            would be alone: positions that restart, a mask in addition, or none as nothing helps.
            Of a classifier, whether it gets a mask where padding is.
        head: whether it is a decoder, or a classifier of sequences.
        caches: whether it continues a row by the keys and values that it keeps in a cache; if not,
            it reads all tokens anew for each.

    Raises:
        InputError: this transformers has no such model.
    """

    raw: Mapping[str, Any] = field(hash=False)
    forms: FormPlan = field(default_factory=FormPlan)
    packing: Packing = "none"
    head: HeadKind = "tokens"
    caches: bool = False

    def __post_init__(self) -> None:
        architecture(self.raw, self.head)

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model; forms are not in it, as files hold dense layers."""
        return dict(self.raw)

    @property
    def model_type(self) -> str:
        """What transformers calls the architecture."""
        return str(self.raw["model_type"])

    @property
    def vocabulary_size(self) -> int:
        """How many tokens there are logits for."""
        return int(described(self.raw).vocab_size)

    @functools.cached_property
    def rope_limits(self) -> RopeLimits:
        """Where positions begin to depend on how long a row is."""
        return RopeLimits.of(described(self.raw))

    def packing_of(self, tokens: int) -> Packing:
        """What the model gets of documents that share a row of so many tokens."""
        return self.packing if self.rope_limits.alike(tokens) else "none"

    @property
    def context(self) -> int:
        """The longest sequence, in tokens: where the model does not say one, 2^20."""
        known = described(self.raw)
        found = (getattr(known, name, None) for name in _CONTEXTS)
        return next((each for each in found if isinstance(each, int) and each > 0), _ENDLESS)

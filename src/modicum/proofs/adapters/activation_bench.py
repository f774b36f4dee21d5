"""What a decoder keeps for the backward pass with an adapter: by unique storage, parameters apart.

Four blocks of width 256 (SwiGLU of 704, 8 heads) on 4 x 256 tokens. Next to what an adapter keeps
stands the frozen floor: what is kept where nothing in the blocks is trained and gradients only flow
through them. No adapter on every layer can keep less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from modicum.adapters.base import Adapter
from modicum.models import ModelConfig, create
from modicum.models.llama import Llama
from modicum.proofs.bench.meters import saved_bytes

CONFIG = ModelConfig(vocabulary_size=16, width=256, layers=4, heads=8, mlp_width=704, context=256)
ROWS, TOKENS = 4, 256


@dataclass(frozen=True)
class ActivationBench:
    """The decoder and its batch.

    Args:
        rows, tokens: of the batch; there are `positions` of them.
        dtype: of the frozen weights and of what they compute.

    >>> from modicum.adapters import LoRA
    >>> bench = ActivationBench(ModelConfig(vocabulary_size=8, width=8, layers=1, heads=2), 2, 4)
    >>> bench.floor < bench.kept(LoRA(rank=1)) < bench.trained_in_full
    True
    """

    config: ModelConfig = CONFIG
    rows: int = ROWS
    tokens: int = TOKENS
    dtype: torch.dtype = torch.float32

    @property
    def positions(self) -> int:
        """Tokens of the batch."""
        return self.rows * self.tokens

    @cached_property
    def floor(self) -> int:
        """Bytes where nothing is trained in the blocks."""
        return self._kept(self._model().requires_grad_(False))

    @cached_property
    def trained_in_full(self) -> int:
        """Bytes where everything is trained."""
        return self._kept(self._model())

    def kept(self, adapter: Adapter) -> int:
        """Bytes with an adapter on the layers that it names."""
        model = self._model()
        attached = adapter.attach(model)
        for _, layer in attached.layers():
            layer.train()
        return self._kept(model)

    def sites(self, adapter: Adapter) -> int:
        """On how many layers the adapter is."""
        return len(adapter.sites(self._model()))

    def _model(self) -> Llama:
        return create(self.config, seed=0).to(self.dtype).train()

    def _kept(self, model: Llama) -> int:
        """Gradients flow from the embeddings' output in any case, so all blocks count alike."""
        hook = model.model.embed_tokens.register_forward_hook(_flows)
        ids = torch.zeros(self.rows, self.tokens, dtype=torch.int64)
        with hook, saved_bytes([*model.parameters(), *model.buffers()]) as saved:
            model(ids)
        return saved.total


def _flows(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    if not output.requires_grad:
        output.requires_grad_()

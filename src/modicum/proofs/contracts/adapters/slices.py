"""Adapters on slices of fused layers: q and v of one weight, interleaved by head."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters.files import load
from modicum.adapters.slices import places
from modicum.core.contracts.catalog import of_value
from modicum.core.random import normal_
from modicum.proofs.contracts.adapters.subjects import (
    AdapterSubject,
    adapters_check,
    assert_close,
    attached,
    starts_and_learns,
    tokens,
)

_HEADS, _WIDTH = 2, 8


@adapters_check(
    unless=("reads_base", "rewrites_base", "writes_base", "prepares_from_data", "after_block")
)
def check_on_slices(subject: AdapterSubject) -> None:
    """On q and v of a fused layer it starts as the base, learns, merges into their rows alone.

    Saved and loaded it is on the same slices, and detached the layer is what it was.
    """
    model, ids = _Fused(), tokens()
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = model(ids)
    adapter = attached(subject, model, targets=("qkv.q", "v_proj"))
    assert len(adapter.sites) == 4, f"it is on {list(adapter.sites)}, not on q and v of two blocks"
    adapted = starts_and_learns(subject, adapter, ids, before)
    record = of_value(adapter.method)
    with tempfile.TemporaryDirectory() as temporary:
        adapter.save(folder := Path(temporary) / "adapter")
        other = load(_Fused(), folder, plugins=() if record.module else (record.file,))
        assert_close(other.model(ids), adapted, 1e-6, "loaded, it computes something else")
        assert list(other.sites) == list(adapter.sites), "loaded, it is on other slices"
    if "mergeable" in subject.info.traits:
        adapter.merge()
        assert_close(model(ids), adapted, 1e-5, "the merged model computes something else")
        for path in {name.rpartition(".")[0] for name in adapter.sites}:
            mine = [site for name, site in adapter.sites.items() if name.startswith(f"{path}.")]
            moved = model.get_submodule(path).get_parameter("weight") != plain[f"{path}.weight"]
            for site in mine:
                assert site.rows is not None
                moved[places(site.rows)] = False
            assert not moved.any(), f"merging changes rows of {path} that no slice has"
        adapter.unmerge()
    adapter.detach()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, plain[name]), f"the detached model has another {name}"


class _Block(nn.Module):
    """An attention whose q, k and v are one layer, head by head, and what it adds to a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        """The stream [rows, tokens, width] and what is added to it."""
        parts = self.qkv(self.norm(stream)).unflatten(-1, (_HEADS, -1)).transpose(1, 2)
        query, key, value = parts.chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return stream + self.out(mixed.transpose(1, 2).flatten(2))


class _Fused(nn.Module):
    """Two such blocks between a table of tokens and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(29, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(_WIDTH, 29, bias=False)
        for name, parameter in self.named_parameters():
            normal_(parameter, std=0.4, seed=0, name=name)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [rows, tokens, 29] of token ids [rows, tokens]."""
        stream = self.table(ids)
        for block in self.blocks:
            stream = block(stream)
        return self.head(stream)

from __future__ import annotations

import torch

from modicum.data import IGNORED, Batch


def make(documents: bool) -> Batch:
    ids = torch.arange(15).view(5, 3)
    labels = (ids + 1).masked_fill(ids % 4 == 0, IGNORED)  # 0, 4, 8 and 12 are not trained
    return Batch(ids, labels, torch.zeros(5, 3, dtype=torch.int32) if documents else None)


def test_trained_tokens_counts_labels():
    assert make(documents=False).count == 11


def test_split_keeps_order_and_loses_nothing():
    for documents in (False, True):
        batch = make(documents)
        parts = batch.split(2)
        assert [len(part.input_ids) for part in parts] == [2, 2, 1]
        assert [part.count for part in parts] == [4, 5, 2]
        assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
        assert all((part.documents is not None) == documents for part in parts)
        assert parts[0].input_ids.data_ptr() == batch.input_ids.data_ptr()


def test_to_moves_every_tensor():
    moved = make(documents=True).to("meta")
    assert {moved.input_ids.device.type, moved.labels.device.type} == {"meta"}
    assert moved.documents is not None
    assert moved.documents.device.type == "meta"
    assert make(documents=False).to("meta").documents is None

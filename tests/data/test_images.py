from __future__ import annotations

import sys

import pytest
import torch

from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.data.images import DIGITS, ImageBatch, Textures, digits
from modicum.data.rank_split import counted, micro_batches


def test_textures_are_a_function_of_seed_and_number() -> None:
    data = Textures(50, 7, seed=3)
    batch = data.batch([4, 40, 11])
    assert batch.labels.tolist() == [4, 40 % 7, 11 % 7]
    assert torch.equal(batch.images[1], data.batch([40]).images[0])
    assert torch.equal(batch.images[1], Textures(9, 7, 3, first=38).batch([2]).images[0])
    other = Textures(50, 7, seed=4).batch([40]).images[0]
    assert not torch.equal(batch.images[1], other)


def test_textures_are_about_standard_and_of_one_class_are_not_alike() -> None:
    images = Textures(200, 4, seed=0).batch(range(200)).images
    assert images.shape == (200, 3, 32, 32)
    assert abs(float(images.mean())) < 0.1
    assert 0.5 < float(images.std()) < 1.5
    same = images[0::4].flatten(1)
    similar = torch.corrcoef(same)[~torch.eye(len(same), dtype=torch.bool)]
    assert similar.abs().max() < 0.7


def test_a_linear_model_does_not_tell_textures_apart_and_directions_do() -> None:
    """Phases are random, so no pixel says anything by itself."""
    data = Textures(600, 4, seed=0)
    batch = data.batch(range(600))
    means = torch.stack([batch.images[batch.labels == label].mean(0) for label in range(4)])
    noise = batch.images.std() / 150**0.5
    grey = means.mean(1)  # a colour may differ; a pixel's place may not
    assert float((grey - grey.mean((1, 2), keepdim=True)).abs().mean()) < 2 * float(noise)
    spectrum = torch.fft.rfft2(batch.images.mean(1)).abs()
    by_class = torch.stack([spectrum[batch.labels == label].mean(0) for label in range(4)])
    strongest = [tuple(divmod(int(s[:, 1:].argmax()), 16)) for s in by_class]
    assert len(set(strongest)) == 4


def test_digits_are_scikit_learns_each_pixel_a_square() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    train, held, none = digits(seed=0, held_out=297)
    assert held is not None
    assert none is None
    assert (len(train), len(held)) == (1500, 297)
    batch = train.batch([0, 1])
    assert batch.images.shape == (2, 1, 32, 32)
    small = batch.images[0, 0, ::4, ::4]
    assert torch.equal(small.repeat_interleave(4, 0).repeat_interleave(4, 1), batch.images[0, 0])
    source = datasets.load_digits()
    found = torch.from_numpy(source.images).float() / 8 - 1
    where = (found == small).flatten(1).all(1).nonzero().flatten().tolist()
    assert int(batch.labels[0]) in {int(source.target[index]) for index in where}
    everything = torch.cat([train.batch(range(1500)).labels, held.batch(range(297)).labels])
    assert torch.equal(everything.bincount(), torch.from_numpy(source.target).bincount())


def test_which_digits_are_held_out_depends_on_the_seed() -> None:
    pytest.importorskip("sklearn")
    one, other = (digits(seed, 100)[1] for seed in (0, 1))
    assert one is not None
    assert other is not None
    assert not torch.equal(one.batch(range(100)).labels, other.batch(range(100)).labels)
    assert digits(0, 0)[1] is None


def test_the_digits_to_test_on_are_the_same_with_any_seed() -> None:
    pytest.importorskip("sklearn")
    (train, held, one), (_, _, other) = (digits(seed, 100, 50) for seed in (0, 1))
    assert held is not None
    assert one is not None
    assert other is not None
    assert (len(train), len(held), len(one)) == (DIGITS - 150, 100, 50)
    batch = one.batch(range(50))
    assert torch.equal(batch.images, other.batch(range(50)).images)
    with pytest.raises(InputError, match="less than 1747"):
        digits(0, 1747, 50)


def test_digits_need_scikit_learn_and_leave_something(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="leaves no images"):
        digits(0, DIGITS)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"scikit-learn, which is not installed.*textures"):
        digits(0, 10)


def test_batches_are_cut_up_and_counted() -> None:
    batch = ImageBatch(torch.randn(5, 1, 4, 4), torch.tensor([0, 1, -100, 2, 3]))
    assert (batch.rows, batch.count, batch.device.type) == (5, 4, "cpu")
    parts = batch.split(2)
    assert [part.rows for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part.images for part in parts]), batch.images)
    idle = batch.idle()
    assert (idle.rows, idle.count) == (1, 0)
    assert torch.equal(batch.to("cpu").images, batch.images)


def test_ranks_share_images_as_they_share_text() -> None:
    data = Textures(20, 4, seed=0)
    shares = [list(micro_batches(data, range(5), 2, Ranks(rank, 2, rank, 2))) for rank in range(2)]
    assert [[batch.count for batch in share] for share in shares] == [[2, 0], [2, 1]]
    assert [counted(data, range(5), Ranks(rank, 2, rank, 2)) for rank in range(2)] == [2, 3]


def test_the_worst_batch_and_all_shapes() -> None:
    data = Textures(3, 2, seed=0)
    assert data.worst(5).labels.tolist() == [0, 1, 0, 0, 1]
    assert [batch.rows for batch in data.shapes([2, 4, 2])] == [4, 2]
    with pytest.raises(ValueError, match="0 rows"):
        data.worst(0)

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.ranks.ranks import Ranks
from modicum.data import IGNORED, Packed, TokenStore
from modicum.data.rank_split import counted, micro_batches, share


@given(st.integers(1, 40), st.integers(1, 9))
def test_ranks_share_all_rows_and_differ_by_one_at_most(rows: int, size: int) -> None:
    shares = [share(range(100, 100 + rows), Ranks(rank, size)) for rank in range(size)]
    assert [row for each in shares for row in each] == list(range(100, 100 + rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.fixture(scope="module")
def packed(
    tmp_path_factory: pytest.TempPathFactory, write_store: Callable[..., TokenStore]
) -> Packed:
    documents = [(list(range(10 * n + 1, 10 * n + 8)), n % 3) for n in range(12)]
    return Packed(write_store(tmp_path_factory.mktemp("packed"), documents), 8)


@given(st.integers(1, 10), st.integers(1, 5), st.integers(1, 4))
def test_micro_batches_of_all_ranks_are_the_update(
    packed: Packed, count: int, size: int, ranks: int
) -> None:
    rows = [(3 * n) % len(packed) for n in range(count)]
    everybody = [list(micro_batches(packed, rows, size, Ranks(r, ranks))) for r in range(ranks)]
    assert len({len(batches) for batches in everybody}) == 1
    found = []
    for rank, batches in enumerate(everybody):
        trained = [batch for batch in batches if batch.count]
        assert all(len(batch.input_ids) <= size for batch in batches)
        assert sum(batch.count for batch in trained) == counted(packed, rows, Ranks(rank, ranks))
        found += [row for batch in trained for row in batch.labels.tolist()]
    assert found == packed.batch(rows).labels.tolist()


def test_a_rank_without_rows_trains_nothing(packed: Packed) -> None:
    (batch,) = micro_batches(packed, [2], 4, Ranks(0, 2))
    assert (batch.labels == IGNORED).all()
    (other,) = micro_batches(packed, [2], 4, Ranks(1, 2))
    assert other.count == packed.count(2) > 0

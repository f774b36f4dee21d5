"""Data sets of the Hugging Face hub as streams: rows come over the network, and none is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from modicum.data.arrow_rows import row_of
from modicum.data.hub import HubName, loaded, said_by_datasets
from modicum.data.json_rows import DataRow

HubState = dict[str, Any]


@dataclass(frozen=True)
class HubStream:
    """The rows of a data set, read by `datasets` with `streaming=True`.

    Args:
        spelling: as `HubName` reads it.
    """

    spelling: str

    @property
    def name(self) -> HubName:
        """What is read, which may be spelled in several ways.

        Raises:
            InputError: the spelling names no data set.
        """
        return HubName.parsed(self.spelling)

    def opened(
        self, skip: int = 0, state: HubState | None = None
    ) -> tuple[Iterator[DataRow], Callable[[], HubState | None]]:
        """The rows after the first `skip`, and what gives the state after the row that came last.

        Args:
            state: what was given after the row before; those before it are not read again then.

        Raises:
            InputError: the data set cannot be loaded or read, with the reason in one sentence.
        """
        with said_by_datasets(self.spelling):
            stream = loaded(self.spelling, streaming=True)
            if state is not None:
                stream.load_state_dict(state)
            elif skip:
                stream = stream.skip(skip)

        def rows() -> Iterator[DataRow]:
            with said_by_datasets(self.spelling):
                for number, columns in enumerate(stream, skip + 1):
                    yield row_of(number, columns)

        return rows(), lambda: _plain(stream.state_dict())


def _plain(state: HubState) -> HubState | None:
    """The state, if it is the same when it comes from JSON; else rows are counted."""
    try:
        return state if json.loads(json.dumps(state)) == state else None
    except TypeError:
        return None

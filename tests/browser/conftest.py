"""One browser for all tests of the page; without one they are skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.report.conftest import run_folder

if TYPE_CHECKING:
    from tests.browser.chromium import Chromium, Tab

OpenTab = Callable[..., "Tab"]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A running Chromium."""
    if importlib.util.find_spec("websockets") is None:
        pytest.skip("the package websockets is not installed")
    from tests.browser import chromium

    if chromium.found() is None:
        pytest.skip("Chromium is not installed")
    with chromium.Chromium.started(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def tab(browser: Chromium) -> Iterator[OpenTab]:
    """Opens pages, which must have given no cause for complaint when the test ends."""
    from tests.browser.chromium import Tab

    opened: list[Tab] = []

    def open_tab(page: Path | str, **options: Any) -> Tab:
        address = page.as_uri() if isinstance(page, Path) else page
        opened.append(Tab(browser, address, **options))
        return opened[-1]

    yield open_tab
    for one in opened:
        assert one.complaints() == []
        one.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two run folders of different lengths."""
    folder = tmp_path_factory.mktemp("runs")
    return [run_folder(folder / "long", steps=240), run_folder(folder / "short", steps=120)]

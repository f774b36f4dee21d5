"""Chromium without a window, driven by its DevTools protocol over one websocket."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Escape": 27, "Tab": 9}
PATIENCE = 20.0  # seconds for what takes a fraction of one


def found() -> str | None:
    """The browser's path; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """A running browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self._count = socket, itertools.count(1)
        self.events: list[dict[str, Any]] = []

    @classmethod
    @contextmanager
    def started(cls, folder: Path) -> Iterator[Self]:
        path = found()
        assert path is not None
        words = ["--headless=new", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync",
                 f"--user-data-dir={folder}", "about:blank"]  # fmt: skip
        if os.getuid() == 0:
            words.insert(0, "--no-sandbox")
        with subprocess.Popen([path, *words], stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                lines = (re.search(r"ws://\S+", line) for line in process.stderr)
                address = next(match[0] for match in lines if match)
                with connect(address, max_size=None) as socket:
                    yield cls(socket)
            finally:
                process.terminate()

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come before it are kept."""
        number = next(self._count)
        message = {"id": number, "method": method, "params": parameters}
        self.socket.send(json.dumps(message | ({"sessionId": session} if session else {})))
        while True:
            answer = json.loads(self.socket.recv(timeout=PATIENCE))
            if answer.get("id") != number:
                self.events.append(answer)
                continue
            assert "error" not in answer, answer["error"]
            return dict(answer["result"])


class Tab:
    """One page: what it holds, and a pointer and keys for it."""

    def __init__(self, browser: Chromium, address: str, width: int = 1100, **media: str) -> None:
        self._browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session, self.target = attached["sessionId"], target
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        features = [{"name": name.replace("_", "-"), "value": v} for name, v in media.items()]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && typeof drawnCharts !== 'undefined'")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command for this page."""
        return self._browser.send(method, self.session, **parameters)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a JavaScript condition holds."""
        end = time.monotonic() + PATIENCE
        while not self.value(condition):
            assert time.monotonic() < end, f"never came true: {condition}"
            time.sleep(0.02)

    def frame(self) -> None:
        """Until what was done is drawn."""
        done = "new Promise(done => requestAnimationFrame(() => setTimeout(() => done(true))))"
        self.value(done)

    def press(self, key: str, **parameters: Any) -> None:
        """A key, down and up."""
        text = {"text": key} if len(key) == 1 else {}
        code = {"windowsVirtualKeyCode": KEYS.get(key, ord(key[0].upper()))}
        event = {"key": key} | code | parameters
        self.send("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **event)
        self.frame()

    def pointer(self, kind: str, x: float, y: float) -> None:
        """The pointer at a place of the window: `mouseMoved`, `mousePressed`, `mouseReleased`."""
        held = {"button": "none" if kind == "mouseMoved" else "left", "clickCount": 1}
        buttons = {"buttons": 0 if kind == "mouseReleased" else int(kind == "mousePressed")}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held, **buttons)

    def complaints(self) -> list[str]:
        """What the browser had to say against the page: errors, warnings, refusals."""
        self.value("1")
        said = {"Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"}
        return [json.dumps(event["params"]) for event in self._events() if event["method"] in said]

    def requests(self) -> list[str]:
        """The addresses that the page asked for."""
        asked = [e for e in self._events() if e["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in asked]

    def _events(self) -> list[dict[str, Any]]:
        return [e for e in self._browser.events if e.get("sessionId") == self.session]

    def picture(self, path: Path) -> None:
        """Keep a picture of the page, to look at."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """Close the page."""
        self._browser.send("Target.closeTarget", targetId=self.target)

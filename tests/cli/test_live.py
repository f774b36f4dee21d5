"""What a run tells: each mode's words, how often, and that no broken stream stops a run."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modicum.cli import live, live_words
from modicum.cli.live import listener

PLAN: dict[str, Any] = {
    "event": "plan",
    "revision": 1,
    "choices": [{"field": "training.micro_batch_size", "value": 8, "why": "largest that fits"}],
    "prediction": {"peak_bytes": 512_000_000, "process_bytes": 1_090_000_000,
                   "budget_bytes": 1_200_000_000, "tokens_per_second": 7000.0, "seconds": 140.0},
    "parameters": {"total": 30_000_000, "trainable": 600_000},
}  # fmt: skip
FINISHED: dict[str, Any] = {
    "event": "finished", "status": "finished", "steps": 100, "seconds": 62.0,
    "tokens_per_second": 7431.0,
    "final": {"loss": 2.5, "validation_loss": 2.75, "test": {"loss": 2.625}},
    "peak_bytes": {"process": 1_040_000_000, "budget": 1_200_000_000}, "error": None,
    "time": {"rows": {"compute/forward": 20.0, "compute/backward": 30.0, "data": 11.9,
                      "unexplained": 0.1}},
}  # fmt: skip


class Terminal(io.StringIO):
    """A terminal of a hundred columns' width that says that it is one."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Broken(Terminal):
    """A pipe whose reader goes away after some writes."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.left = writes

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        return super().write(text)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still unless a test moves it; and a plain environment."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for name in ("CI", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    return now


def step(number: int, steps: int = 100, **others: Any) -> dict[str, Any]:
    row = {"event": "step", "step": number, "steps": steps, "loss": 3.0, "bytes": 1_040_000_000,
           "tokens_per_second": 7431.5, "seconds_left": 65.0}  # fmt: skip
    return row | others


def run(mode: Any, stream: io.StringIO, steps: int = 100) -> str:
    with listener(mode, stream) as hear:
        hear({"event": "phase", "name": "tokenizing", "done": 0, "total": 50})
        hear(PLAN)
        hear({"event": "evaluation", "step": 0, "loss": 3.9871})
        hear({"event": "test", "step": 100, "loss": 2.625, "rows": 9})
        for number in range(1, steps + 1):
            hear(step(number, steps))
        hear({"event": "warning", "message": "a [bold] word"})
        hear({"event": "sample", "step": 100, "prompt": "def", "text": "def f():\n  \x1b[2Jx"})
        hear({"event": "checkpoint", "step": 100, "path": "a/step-00000100", "seconds": 0.2})
        hear({"event": "novelty"})
        hear(FINISHED)
    return stream.getvalue()


def test_lines_say_every_tenth_and_no_control_code() -> None:
    text = run("lines", io.StringIO())
    assert re.findall(r"^step (\d+)/100", text, flags=re.MULTILINE) == [
        str(10 * tenth) for tenth in range(1, 11)
    ]
    assert "step 10/100  training loss 3.000  7,432 tokens/s  1.04 GB of 1.2 GB  1 min 05 s" in text
    assert "training.micro_batch_size  8      largest that fits" in text
    assert "validation loss 3.9871 before training" in text
    assert "sample after step 100: f(): [2Jx" in text
    assert "warning: a [bold] word" in text
    assert "checkpoint step-00000100 saved in 0.2 s" in text
    ended = "finished after 100 steps in 1 min 02 s; training loss of the last step 2.5000"
    assert f"{ended}; validation loss 2.7500; test loss 2.6250" in text
    assert "\ntest loss 2.6250 after step 100\n" in text
    assert text.endswith("\ntime: compute 81 %, data 19 %, unexplained 0.2 %\n")
    assert not re.search(r"[^\n\x20-\x7e]", text)


def test_a_phase_says_how_far_it_is_and_how_long_it_takes(clock: list[float]) -> None:
    stream = io.StringIO()
    with listener("lines", stream) as hear:
        for done in (12, 25):
            clock[0] += 10
            hear({"event": "phase", "name": "tokenizing", "done": done, "total": 50})
        clock[0] += 10
        counted = {"done": 3, "total": 8, "unit": "run", "about": True, "seconds_left": 70.0}
        hear({"event": "phase", "name": "lora, seed 2"} | counted)
    assert stream.getvalue() == (
        "tokenizing  24 %\ntokenizing  50 %\n"
        "run 3 of about 8  about 1 min 10 s left  lora, seed 2\n"
    )


def test_a_short_line_leaves_out_what_python_holds_and_not_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = PLAN | {"prediction": PLAN["prediction"] | {"process_base": 400_000_000}}
    for width, shown in ((140, True), (100, False)):
        stream = Terminal()
        monkeypatch.setenv("COLUMNS", str(width))
        with listener("live", stream) as hear:
            hear(plan)
            hear(step(100))
        assert ("1.2 GB (400 MB Python and torch)" in stream.getvalue()) is shown
        assert "1 min 05 s left" in stream.getvalue()


def test_lines_come_every_five_seconds_and_later_more_rarely(clock: list[float]) -> None:
    stream = io.StringIO()
    said = []
    with listener("lines", stream) as hear:
        for number in range(1, 4001):
            clock[0] += 1.0
            before = len(stream.getvalue())
            hear(step(number, 100_000))
            if len(stream.getvalue()) > before:
                said.append(number)
    assert said[:3] == [5, 10, 15]
    assert 55 <= said[-1] - said[-2] <= 60


def test_json_is_every_event_and_strict() -> None:
    stream = io.StringIO()
    with listener("json", stream) as hear:
        hear(step(1, loss=float("nan"), path=Path("a/b")))
        hear({"event": "novelty", "text": "a\nb"})
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["loss"] is None
    assert first["path"] == "a/b"
    assert second == {"event": "novelty", "text": "a\nb"}


def test_quiet_says_warnings_only() -> None:
    assert run("quiet", io.StringIO()) == "warning: a [bold] word\n"


def test_live_rewrites_one_line(clock: list[float]) -> None:
    stream = Terminal()
    text = run("live", stream)
    # The clock stands still, so after the phase's line nothing is drawn but the last step's.
    assert set(re.findall(r"step (\d+)/100", text)) == {"100"}
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "✓ tokenizing" in plain
    assert "largest that fits" in plain
    assert "the budget is 1.2 GB" in plain
    assert "a [bold] word" in plain
    assert "\x1b[2J" not in text
    assert max(len(line) for line in re.split(r"[\r\n]", plain)) <= 100
    assert text.rindex("\x1b[?25h") > text.index("\x1b[?25l")  # the cursor is given back
    assert "1.2 GB" in plain.splitlines()[-2]
    assert plain.rstrip().endswith("time: compute 81 %, data 19 %, unexplained 0.2 %")


def test_live_draws_at_most_eight_times_a_second(clock: list[float]) -> None:
    stream = Terminal()
    with listener("live", stream) as hear:
        for number in range(1, 1001):
            clock[0] += 0.01
            hear(step(number, 100_000))
        text = stream.getvalue()
    # Ten seconds; a drawing falls on the first step that is late enough, each 0.13 s.
    assert 70 <= len(re.findall(r"step \d+/100000", text)) <= 80


def test_memory_above_the_budget_is_red() -> None:
    stream = Terminal()
    with listener("live", stream) as hear:
        hear(PLAN)
        hear(step(1, bytes=1_300_000_000))
    assert re.search(r"\x1b\[1;31m1.3 GB of 1.2 GB", stream.getvalue())


@pytest.mark.parametrize("mode", ["live", "lines", "json", "quiet"])
@pytest.mark.parametrize("writes", [0, 1, 7])
def test_a_broken_pipe_does_not_stop_the_run(mode: str, writes: int) -> None:
    before = sys.stdout, sys.stderr
    run(mode, Broken(writes))
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("mode", ["lines", "json", "quiet"])
def test_a_closed_stream_does_not_stop_the_run(mode: Any) -> None:
    stream = io.StringIO()
    hear = listener(mode, stream)
    stream.close()
    hear({"event": "warning", "message": "unheard"})
    hear.close()


def test_a_stream_of_few_letters_gets_what_it_can_show() -> None:
    raw = io.BytesIO()
    with listener("quiet", io.TextIOWrapper(raw, encoding="ascii", write_through=True)) as hear:
        hear({"event": "warning", "message": "naïve"})
        assert raw.getvalue() == b"warning: na?ve\n"


def test_auto_is_live_only_where_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert live.can_rewrite(Terminal())
    assert not live.can_rewrite(io.StringIO())
    for name, value in (("TERM", "dumb"), ("CI", "true")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not live.can_rewrite(Terminal())
            assert isinstance(listener("auto", Terminal()), live.Lines)
    latin = Terminal()
    latin.encoding = "latin-1"
    assert not live.can_rewrite(latin)


def test_no_color_leaves_the_line_and_takes_the_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with listener("auto", stream) as hear:
        hear(step(1))
    assert "step 1/100" in stream.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*3\dm", stream.getvalue())


def test_the_loss_is_averaged_over_what_was_not_skipped() -> None:
    gauge = live_words.Gauge()
    gauge.step(step(1, loss=2.0))
    gauge.step(step(2, loss=float("nan")))
    gauge.step(step(3, loss=100.0, skipped=True))
    assert gauge.loss == 2.0
    gauge.step(step(4, loss=3.0))
    assert gauge.loss == pytest.approx((0.9 * 2 + 3) / 1.9)


def test_how_a_run_ended() -> None:
    interrupted = live_words.finished(FINISHED | {"status": "interrupted"})
    assert interrupted.endswith("the same command resumes from here")
    failed = live_words.finished({"status": "failed", "error": "no such luck"})
    assert failed == "failed; no such luck"


def test_a_checkpoint_says_how_long_training_waited_for_it() -> None:
    event = {"event": "checkpoint", "step": 100, "path": "a/step-00000100", "seconds": 0.05}
    later = event | {"written_seconds": 2.11, "bytes": 390_000_000}
    assert live_words.checkpoint(event) == "checkpoint step-00000100 saved in 0.05 s"
    assert live_words.checkpoint(later) == (
        "checkpoint step-00000100 saved, 390 MB in 2.1 s; training waited 0.05 s"
    )


@pytest.mark.parametrize("mode", ["live", "lines"])
def test_what_becomes_of_compiling_and_of_memory_is_said(mode: Any) -> None:
    stream = Terminal()
    with listener(mode, stream) as hear:
        hear({"event": "compile", "message": "blocks stay\nas they are"})
        hear({"event": "memory", "message": "micro-batches of 2 rows [4 before]"})
        hear({"event": "export", "message": "adapter/ is a LoRA of rank 2"})
    assert "export: adapter/ is a LoRA of rank 2" in stream.getvalue()
    assert "compile: blocks stay as they are" in stream.getvalue()
    assert "memory: micro-batches of 2 rows [4 before]" in stream.getvalue()


@pytest.mark.parametrize("mode", ["live", "lines", "json", "quiet"])
def test_an_event_that_lacks_everything_stops_neither_run_nor_listener(mode: Any) -> None:
    names = ("phase", "plan", "resumed", "step", "evaluation", "sample", "checkpoint", "compile")
    names += ("memory", "finished", "", "close")
    stream = Terminal()
    with listener(mode, stream) as hear:
        for event in ({}, *({"event": name} for name in names)):
            hear(event)
        hear({"event": "warning", "message": "still heard"})
    assert "still heard" in stream.getvalue()


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="no such mode: 'loud'"):
        listener("loud")  # type: ignore[arg-type]


def test_standard_output_without_a_reader_ends_quietly() -> None:
    script = """
from modicum.cli.live import listener
with listener("json") as hear:
    for step in range(2000):
        hear({"event": "step", "step": step, "text": "x" * 100})
import sys
print("went on", file=sys.stderr)
"""
    # `python -c` finds the package where this process found it.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == "went on\n"
    assert process.returncode == 0

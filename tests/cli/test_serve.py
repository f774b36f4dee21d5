"""`modicum serve`, and the page on it: what it says, and that its programs run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_troubleshooting import matches
from tests.serve.conftest import make_adapter, make_model

from modicum.cli.options import named_adapters
from modicum.data.named_templates import NAMED
from modicum.data.tokenizer import Tokenizer
from modicum.serve.asked import MOST_CHOICES, AskedAnswer, AskedText

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "serve.md"
TEXT = PAGE.read_text(encoding="utf-8")
CONSOLE = re.findall(r"^```console\n\$ (.+?)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
[LINE] = re.findall(r"^```text\n(.*?)\n```", TEXT, re.MULTILINE)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs that the page names."""
    made = tmp_path_factory.mktemp("serve")
    words = iter(["to be or not to be"] * 9)
    tokenizer = Tokenizer.train(words, vocabulary_size=290, template=NAMED["chatml"])
    model = make_model(made / "model", tokenizer)
    for seed, name in enumerate(("mine", "formal")):
        make_adapter(made / "runs" / name, model, tokenizer, seed)
    peft = made / "path" / "to" / "peft-folder"
    shutil.copytree(made / "runs" / "formal" / "adapter", peft)
    return made


def begun(place: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "modicum", "serve", *arguments],
        cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[dict[str, Any]]:
    """A server with the adapters of the page, which Ctrl-C ends."""
    pytest.importorskip("uvicorn")
    [command] = re.findall(r"^modicum serve (runs/mine --adapter .+)$", TEXT, re.MULTILINE)
    process = begun(place, *shlex.split(command), "--port", "0", "--json")
    assert process.stdout is not None
    facts: dict[str, Any] = json.loads(process.stdout.readline())
    yield facts
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.expensive
def test_the_line_of_json_says_what_is_served(server: dict[str, Any]) -> None:
    names = ["adapter", "base", "formal", "short"]
    assert server.keys() == {"address", "models", "chat", "context"}
    assert (server["models"], server["chat"], server["context"]) == (names, names, 96)


@pytest.mark.expensive
@pytest.mark.parametrize("program", PROGRAMS, ids=["answer", "stream"])
def test_a_program_of_the_page_runs(
    server: dict[str, Any], program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openai")
    assert "http://127.0.0.1:8322/v1" in program
    exec(program.replace("http://127.0.0.1:8322/v1", server["address"]), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.expensive
def test_the_page_s_curl_is_answered(server: dict[str, Any]) -> None:
    [words] = re.findall(r"^curl (.+?)^```", TEXT, re.MULTILINE | re.DOTALL)
    url, _, header, _, body = shlex.split(words.replace("\\\n", ""))
    assert url.startswith("http://127.0.0.1:8322/v1/")
    assert header == "Content-Type: application/json"
    asked = urllib.request.Request(
        url.replace("http://127.0.0.1:8322/v1", server["address"]),
        body.encode(),
        dict([header.split(": ")]),
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert json.load(answer)["choices"][0]["finish_reason"] in ("length", "stop")


@pytest.mark.expensive
def test_it_ends_while_it_answers(place: Path) -> None:
    openai = pytest.importorskip("openai")
    process = begun(place, "runs/mine", "--port", "0")
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    url = line.split()[0]
    assert re.sub(r":\d+/", ":8322/", line) == LINE
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    stream = client.completions.create(
        model="base", prompt=[1, 2], max_tokens=90, n=16, stream=True
    )
    pieces = iter(stream)
    next(pieces)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="closing"):
        list(pieces)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize(("command", "shown"), CONSOLE, ids=[command for command, _ in CONSOLE])
def test_a_command_of_the_page_ends_as_it_says(
    modicum: Any, place: Path, monkeypatch: pytest.MonkeyPatch, command: str, shown: str
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.delenv("MODICUM_API_KEY", raising=False)
    words = shlex.split(command)[1:]
    ended = modicum(*words, *(() if "--host" in words else ("--port", "0")))
    *message, code = shown.strip().split("\n")
    assert code == f"exit code {ended.code}", ended.err
    assert matches("\n".join(message), (ended.err + ended.out).strip())


def test_a_port_in_use_and_a_name_without_folder_are_one_message(modicum: Any, place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = modicum("serve", place / "runs", "--port", str(port))  # the folder comes first
        ended = modicum("serve", place / "runs" / "mine", "--port", str(port))
    assert (wrong.code, "neither a run nor a model" in wrong.err) == (2, True)
    assert (ended.code, ended.out) == (2, "")
    assert f"port {port} of 127.0.0.1 is taken; give another with --port (0: any" in ended.err
    for problem, *words in (
        ("no such folder of an adapter", "a"),
        ("say it as NAME=FOLDER, or as FOLDER alone", "=b"),
        ("say it as NAME=FOLDER, or as FOLDER alone", "a="),
        ("two adapters have one name", "a=b", "--adapter", "a=c"),
        ("two adapters have one name", "b/a", "--adapter", "c/a"),
    ):
        ended = modicum("serve", place / "runs" / "mine", "--adapter", *words)
        assert (ended.code, ended.err.count("\n")) == (2, 1)
        assert "--adapter" in ended.err
        assert problem in ended.err


def test_a_folder_alone_names_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_equals = tmp_path / "rate=0.1"
    with_equals.mkdir()
    given = ["runs/formal", "short=runs/other/", "peft/", str(with_equals)]
    assert named_adapters(given) == {
        "formal": Path("runs/formal"),
        "short": Path("runs/other"),
        "peft": Path("peft"),
        "rate=0.1": with_equals,
    }
    monkeypatch.chdir(with_equals)
    assert named_adapters(["."]) == {"rate=0.1": Path()}


def test_the_limits_of_the_page_are_the_program_s() -> None:
    asked = AskedText(model="m", prompt="a")
    assert f"of a text {asked.most_tokens} " in TEXT.replace("|", "")
    assert f"up to {MOST_CHOICES} choices" in TEXT
    rows = re.findall(r"^\| (`.+?) \|", TEXT.split("## What a request may say")[1], re.MULTILINE)
    named = {name.split(".")[0] for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert named == {*AskedAnswer.model_fields, *AskedText.model_fields} - {"model"}

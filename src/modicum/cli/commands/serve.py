"""`modicum serve`: a run's model behind an OpenAI-style endpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modicum.cli.options import AdaptersOption, JsonOption, TrustOption, named_adapters

if TYPE_CHECKING:
    from modicum.serve.served_models import ServedModels


def serve(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a model folder.")],
    adapter: AdaptersOption = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Fold the run's adapter into its base.")
    ] = False,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0 for any that is free.")
    ] = 8322,
    public: Annotated[
        bool, typer.Option("--public", help="Let a host be one that other machines can ask.")
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="MODICUM_API_KEY", help="What requests must name as their key."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer to a conversation that says no limit.")
    ] = 512,
    at_once: Annotated[int, typer.Option(min=1, help="So many answers are made in turns.")] = 4,
    queue: Annotated[
        int, typer.Option(min=0, help="So many more wait; others are asked to come again.")
    ] = 32,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Serve a run's model to OpenAI's clients, on this machine."""
    from modicum.cli.warned import warnings_as_lines
    from modicum.core.local_server import address, listening
    from modicum.serve.conversation import check_run
    from modicum.serve.loading import load_served
    from modicum.serve.server import check_host
    from modicum.serve.server import serve as begin

    check_host(host, public=public, api_key=api_key)
    adapters = named_adapters(adapter)
    check_run(run)
    # The port comes before the model is loaded, which may take a while.
    with listening(host, port) as listener:
        with warnings_as_lines():
            served = load_served(run, adapters, merge=merge, trust_remote_code=trust_remote_code)
        line = _json if as_json else _line
        begin(
            served,
            listener,
            at_once=at_once,
            queue=queue,
            default_tokens=max_tokens,
            api_key=api_key,
            ready=lambda: print(line(f"{address(host, listener)}/v1", served), flush=True),
        )


def _line(url: str, served: ServedModels) -> str:
    return f"{url}  serves {', '.join(served.names)}  (Ctrl-C ends this)"


def _json(url: str, served: ServedModels) -> str:
    chat = [name for name, model in served.names.items() if model.template is not None]
    facts = {"models": list(served.names), "chat": chat, "context": served.context}
    return json.dumps({"address": url, **facts})

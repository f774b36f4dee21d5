"""`modicum chat`: a run's model writes."""

from __future__ import annotations

from typing import Annotated

import typer

from modicum.cli.options import AdaptersOption, RunArgument, TrustOption, named_adapters
from modicum.core.contracts.method import LARGEST_SEED
from modicum.core.errors import InputError


def chat(
    run: RunArgument,
    prompt: Annotated[
        str | None, typer.Option(help="Continue this text and end; else ask for text.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 for the likeliest.")] = 0.7,
    seed: Annotated[
        int | None, typer.Option(min=0, max=LARGEST_SEED, help="The same seed writes the same.")
    ] = None,
    adapter: AdaptersOption = None,
    base: Annotated[bool, typer.Option("--base", help="Without the run's adapter.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Continue text, whatever template there is.")
    ] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Let a run's model write."""
    from modicum.cli.chat import converse
    from modicum.serve import load_run

    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    if adapter:
        from modicum.serve.adapter_choice import AdapterChoice

        more = named_adapters(adapter)
        choice = AdapterChoice.loaded(run, more, plain=plain, trust_remote_code=trust_remote_code)
        if base:
            choice.use(["base"])
        converse(choice.conversation, prompt, options, choice)
        return
    conversation = load_run(run, trust_remote_code=trust_remote_code)
    if base:
        if conversation.adapter is None:
            raise InputError("this run has no adapter to leave out", file=run, field="--base")
        conversation.adapter.deactivate()
    if plain:
        conversation.template = None
    converse(conversation, prompt, options)

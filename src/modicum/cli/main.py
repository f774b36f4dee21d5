"""Where the `modicum` command begins, and what every error ends as: one message, one exit code."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from types import FrameType

from modicum.cli import streams
from modicum.cli.allocator import begin_tuned
from modicum.cli.places import refusal
from modicum.core.errors import InputError, Interrupted, ModicumError, Restart
from modicum.parallel.rank_environment import LOST, RankPlace, end_with_supervisor, place

# What the extra `cli` brings, by the names that are imported.
EXTRA = ("jinja2", "psutil", "rich", "tokenizers", "typer", "yaml")


def run() -> None:
    """Run the command line and leave with its exit code.

    0 done; 2 the input was wrong; 3 it cannot fit; 4 interrupted and resumable; 5 checked and
    found wanting; 1 a bug.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, on_interrupt)
    try:
        streams.settle()
        begin_tuned()
        _run()
    except KeyboardInterrupt:  # with nothing to save
        _end(_told(Interrupted("interrupted"), _place()))
    except SystemExit as end:
        _end(end.code)


def on_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`, or leave at once while a module is being loaded.

    Nothing is there to save then, and parts of torch that are in C++ would swallow an exception, or
    end the process with a message of their own.
    """
    loads, above = False, frame
    # What stands above `run` loads nothing of ours: another program may have called it.
    while above is not None and above.f_code is not run.__code__:
        name = above.f_globals.get("__name__")
        loads = loads or (above.f_code.co_name == "<module>" and name != "__main__")
        above = above.f_back
    if loads and above is not None:  # else the command has ended, in a program that continues
        here = _place()
        os.write(2, f"modicum: {here.name}{': ' * bool(here.name)}interrupted\n".encode())
        os._exit(Interrupted.exit_code)
    signal.default_int_handler(number, frame)


def _end(code: str | int | None) -> None:
    """Leave with an exit code, as a rank or alone."""
    if _place().size > 1:
        _leave(code)
    sys.exit(code)


def _leave(code: str | int | None) -> None:
    """End this rank without taking the interpreter down.

    A thread of gloo may just be letting go of its last tensor, for which it wants the interpreter;
    where that is half gone the process is aborted, about once in a hundred ends.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run() -> None:
    # Said before a run of hours, not after it.
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        print(
            f"modicum: the command line needs {names}: pip install 'modicum[cli]'", file=sys.stderr
        )
        sys.exit(2)
    # Threads that wait for others yield their core soon. By default they spin: next to one other
    # busy process on two cores a step took 0.34 s so and 0.24 s with this; alone, as long.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    end_with_supervisor()
    here = _place()
    # SIGTERM ends a command as Ctrl-C does; a run in progress has handlers of its own, and saves.
    # A supervised rank has nothing to save before, and may wait for the others in a call that no
    # handler of Python's gets into: it ends as the system ends a process.
    if not here.supervised:
        signal.signal(signal.SIGTERM, on_interrupt)
    try:
        streams.refuse_closed()
        streams.refuse_words(sys.argv[1:])
        _answer()
    except ModicumError as error:
        sys.exit(_told(error, here))
    except streams.OutputLost as lost:
        if lost.gone:
            sys.exit(0)
        sys.exit(_told(lost.told(), here))
    except Exception as error:
        if isinstance(error, OSError) and (refused := refusal(error)) is not None:
            sys.exit(_told(refused, here))
        if not here.first:
            print(f"modicum: {here.name} failed:", file=sys.stderr)
        raise


def _answer() -> None:
    """Run the command, with all that it prints on its way before this ends."""
    from modicum.cli.app import app

    try:
        app(prog_name="modicum")
    except SystemExit:
        streams.finish()
        raise


def _place() -> RankPlace:
    """This process's place; where the environment is wrong, the command finds that itself."""
    try:
        return place()
    except InputError:
        return RankPlace()


def _told(error: ModicumError, here: RankPlace) -> int:
    """Print what is to be said of an error; the exit code."""
    ranks = sys.modules.get("modicum.core.ranks.ranks")  # imported with torch, by those who need it
    if here.supervised and ranks is not None and isinstance(error, ranks.PeerLost):
        return LOST  # the supervisor knows who it was
    name = f"{here.name}: " if here.name else ""
    print(f"modicum: {name}{error}", file=sys.stderr)
    if isinstance(error, Restart) and not here.supervised:
        return Interrupted.exit_code
    return error.exit_code

"""`python -m modicum` is the `modicum` command."""

from __future__ import annotations

from modicum.cli.main import run

if __name__ == "__main__":
    run()

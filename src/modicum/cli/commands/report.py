"""`modicum report`: a run as a page, or as figures."""

from __future__ import annotations

from modicum.cli.options import JsonOption, RunArgument


def report(run: RunArgument, as_json: JsonOption = False) -> None:
    """Write a run's report anew, and say where it is."""
    from modicum import report as reports

    if as_json:
        from modicum.cli.tables import print_json

        print_json(reports.summary(run))
    else:
        print(reports.write(run))

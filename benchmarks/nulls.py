"""Does each proof notice when the method is not there? Every proof's null run, one after the other.

    python benchmarks/nulls.py                 # all; the same command again resumes
    python benchmarks/nulls.py lion muon       # these
    python benchmarks/nulls.py --room optim    # a room's

A null is noticed if nothing is a defect: each null missed a criterion, and each part of the verdict
that stood has fallen; where none stood, what was planted was found. The result is written after
every proof. One that was made by the same sources is not made again; the others of the file stay,
with the time at which they were made, and count as not run: the share is of all proofs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common import RESULTS, alone, say, write_result

from modicum.core.contracts.catalog import catalog, find
from modicum.core.errors import InputError
from modicum.core.files import read_json
from modicum.core.known_outcomes import sources_digest
from modicum.proofs import prove
from modicum.proofs.base import has_proof

NAME, WITHOUT = "nulls", ("tasks",)


def main() -> None:
    """Run the nulls that are left, and write which were noticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="methods; not given: all that have a proof")
    parser.add_argument("--room", help="the methods of this room")
    parser.add_argument("--full", action="store_true", help="the full experiments; takes hours")
    parser.add_argument("--fresh", action="store_true", help="run again what the sources have run")
    asked = parser.parse_args()
    every = [name for name, one in catalog().items() if one.room not in WITHOUT and has_proof(one)]
    names = [find(name).name for name in asked.names] or every
    if asked.room is not None:
        names = [name for name in names if catalog()[name].room == asked.room]
    with alone():
        run_nulls(names, every, full=asked.full, fresh=asked.fresh)


def run_nulls(
    names: Sequence[str], every: Sequence[str], *, full: bool = False, fresh: bool = False
) -> dict[str, Any]:
    """Run the nulls of these proofs but those that are known, and write the file after each.

    Args:
        names: that are run.
        every: that have a proof; those of them that these sources have not run are named in the
            file, and keep the share below 1.
        fresh: run also those that the same sources have run.
    """
    results = known_nulls(RESULTS / f"{NAME}.json", full=full)
    digest = sources_digest()
    if not fresh:
        done = [name for name in names if results.get(name, {}).get("sources") == digest]
        if done:
            say(f"known: {', '.join(done)}")
        names = [name for name in names if name not in done]
    found = summed_up(results, every, digest)
    if results and not names:  # they may be of other sources, or of another list of proofs
        write_result(NAME, found, {"full": full})
    for name in names:
        results[name] = null_of(name, full=full)
        found = summed_up(results, every, digest)
        write_result(NAME, found, {"full": full})
    return found


def known_nulls(file: Path, *, full: bool) -> dict[str, dict[str, Any]]:
    """What an earlier run of the same mode has written; nothing where there is none."""
    if not file.is_file():
        return {}
    before = read_json(file)
    return dict(before["proofs"]) if before["settings"]["full"] == full else {}


def null_of(name: str, *, full: bool) -> dict[str, Any]:
    """What the null run of a proof came to; where a library is missing, that it was not run."""
    started = time.perf_counter()
    made = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "sources": sources_digest(),
    }
    try:
        proof = prove(name, null=True, full=full)
    except InputError as error:
        say(f"{name:10} not run: {error}")
        return {"noticed": None, "reason": str(error)}
    seconds = round(time.perf_counter() - started, 1)
    said = "noticed" if not proof.defects else f"NOT noticed: {proof.reason}"
    say(f"{name:10} {said} ({seconds} s)")
    return {
        "noticed": not proof.defects,
        "planted": proof.planted,
        "defects": list(proof.defects),
        "reason": proof.reason,
        "seconds": seconds,
        **made,
    }


def summed_up(
    results: Mapping[str, Mapping[str, Any]], every: Sequence[str], sources: str
) -> dict[str, Any]:
    """The file's content: proofs in the catalog's order, the share of all of them whose null was
    noticed, how many ran, and which did not.

    Args:
        sources: the digest of the code; what other code has run stays in the file, and counts as
            not run.
    """
    kept = {name: dict(results[name]) for name in every if name in results}
    ran = {name: one["noticed"] for name, one in kept.items() if one.get("sources") == sources}
    return {
        "proofs": kept,
        "share_noticed": sum(ran.values()) / len(every) if every else None,
        "ran": len(ran),
        "not_run": [name for name in every if name not in ran],
    }


if __name__ == "__main__":
    main()

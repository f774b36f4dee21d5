"""C4's diagnosis: which rank or link holds up the others, by the durations of their calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from modicum.comm.watchdog import RankWatchdog
from modicum.comm.watching import COMING_SECONDS, Watch, watch
from modicum.core.contracts.method import Info, PositiveFloat


class C4(RankWatchdog):
    """Names who is dead, failed, stopped, late or slow, or which link; ends what stands still.

    Each rank writes its calls into a ring in shared memory; one process without torch a host
    reads them, and the one next to rank 0 compares durations and numbers of calls, never clocks. A
    rank that has issued fewer calls than those who wait in one is late; the one for which all
    others wait in nearly every iteration, with the shortest durations of its own, is slow. A dead
    rank ends the run at once, a stopped one or a silent host after `silent_seconds`: all that are
    left end with exit code 4. Weights, gradients and what is sent stay as they are, to the bit.

    In `modicum train` it is on where there are several ranks and the recipe does not say `watchdog:
    null`. In any other script it is one call, `modicum.comm.watch`, which has the same arguments,
    under DistributedDataParallel, FSDP2 and `transformers.Trainer` too.

    Messages from one rank to another (`torch.distributed.send`, `isend`, `batch_isend_irecv`) are
    records of a link. One that takes twice as long as it did is named, with its rate; a port, where
    all links of a rank in one direction are; and one on which nothing comes any more ends the run.
    What a rank waits for messages does not count as its own slowness.

    What it cannot tell: anything of links where only collectives travel, as in `modicum train`,
    since there is no record of each connection; a link that was slow from the beginning on; or
    which end of one it is where neither has another in that direction, as in a ring and at two
    ranks: the sentence says so. Nor who computes slowly where nothing but messages is. Nor why a
    rank is slow, but that other programs have its processor (on Linux; it is then named once). It
    compares the ranks of a group, so they must do the same work: stages of a pipeline do not. Of
    iterations shorter than 0.1 s more than ten pass until a rank is named, as other programs
    disturb for as long as that. C4P, which plans flows over paths, is not here.

    Args:
        silent_seconds: without a sign of life, until the run is ended; three at least.
        late_seconds: for which others wait until a rank that lives is named; five times as long
            where it is marked as in no ordinary step, in the first calls, or holds the
            interpreter's lock.
        slow_share: of an iteration that the others wait for a rank, from which on it is slow.

    Source: Dong et al., "Boosting Large-scale Parallel Training Efficiency with C4: A
    Communication-Driven Approach", arXiv 2406.04594, section 3 (C4D). Its thresholds are not
    published; these are this package's own.

    >>> from modicum.comm import C4
    >>> with C4(late_seconds=20.0).watch() as watched:  # one rank: nothing travels
    ...     watched.alone
    True
    """

    info = Info(
        name="c4",
        title="C4: which rank holds up the others, by the durations of collectives",
        room="comm",
        paper="Boosting Large-scale Parallel Training Efficiency with C4: A Communication-Driven "
        "Approach, arXiv 2406.04594",
        claim="downtime by errors from 31.19% to 1.16% of a production job's time, as components "
        "that hang or are slow are located in seconds",
        traits=("exact_resume", "compiles"),
        evidence="reconstructed",
        run_on_gpu=True,
        slot="watchdog",
    )

    silent_seconds: Annotated[float, Field(ge=3, allow_inf_nan=False)] = 8.0
    late_seconds: PositiveFloat = 30.0
    slow_share: Annotated[float, Field(gt=0, lt=1)] = 0.05

    def watch(
        self,
        *,
        record: str | Path | None = None,
        run: str | Path | None = None,
        coming_seconds: float = COMING_SECONDS,
    ) -> Watch:
        """Begin to look at the ranks of the default process group; see `modicum.comm.watch`."""
        return watch(
            silent_seconds=self.silent_seconds,
            late_seconds=self.late_seconds,
            slow_share=self.slow_share,
            record=record,
            run=run,
            coming_seconds=coming_seconds,
        )

"""Methods that end for good in the middle of a run: a revision of the plan says so.

What a method does then is its own, and stands in its state; here the plan is written down without
what it spends, with the step after which that holds. A process that resumes from a later checkpoint
takes it up; one that resumes from an earlier one comes to it again.
"""

from __future__ import annotations

from modicum.trainer.folder import PLAN
from modicum.trainer.session import Session


def note_ended(session: Session) -> None:
    """Revise the plan for methods that ended in the update that was just made, on all ranks."""
    for section, why in session.step_program.hooks.ended().items():
        if section in session.plan.ended:
            continue
        plan = session.plan.ended_after(section, session.step, why)
        written = {"step": session.step, "section": section, "why": why}
        session.folder.append(PLAN, plan.row() | {"ended": written})
        session.plan = plan
        session.emit("ended", step=session.step, revision=plan.revision, message=plan.why)

"""Machines to plan for that we are not on: profiles that ship with modicum, and files of others.

A file is what `modicum bench machine --json` printed on the other machine, or is written by hand
with the same fields. Figures that nobody measured say so in every plan that is made with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from modicum.core.contracts.method import PositiveFloat, describe
from modicum.core.errors import InputError
from modicum.core.files import read_json
from modicum.core.machine import Machine
from modicum.core.machine.record import MachineRecord, Reads
from modicum.core.units import parse_bytes
from modicum.recipe import Recipe

_FOLDER = Path(__file__).resolve().parent / "machines"
_Bytes = Annotated[int, BeforeValidator(parse_bytes)]
_Kept = Annotated[float, Field(ge=0, lt=10)]
_Range = Annotated[tuple[_Kept, _Kept], Field(strict=False)]
_Efficiency = Annotated[float, Field(gt=0, lt=10)]


class OtherRuns(BaseModel):
    """What runs on other data than text have there: see `Profile`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    efficiency: _Efficiency
    base: _Bytes
    kept: _Range = (0.0, 0.0)


class Profile(BaseModel):
    """A machine as plans see it; sizes in bytes or with a unit, rates in FLOP/s and bytes/s.

    Args:
        name: what people call it.
        device: where a run computes there, cpu or cuda.
        memory: of the host, as far as a run may have it, with what Python and torch hold.
        accelerator_memory: of one accelerator.
        flops: of a large matrix product, by precision (`fp32`, `bf16`).
        efficiency: the part of that rate that a step reaches.
        base: what a process holds before the first tensor, with all that a run loads.
        kept: of a byte of tensors, what the allocator keeps next to it: the least and the most.
        images: efficiency, base and kept of runs on images; null: as those on text.
        sequences: the same of runs on sequences.
        link: bytes per second between two ranks; null: not known.
        measured: whether the figures are measurements of such a machine.
        source: where they are from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    device: Literal["cpu", "cuda"]
    memory: _Bytes
    accelerator_memory: _Bytes | None = None
    flops: dict[Literal["fp32", "bf16"], PositiveFloat] = Field(min_length=1)
    efficiency: _Efficiency
    base: _Bytes
    kept: _Range = (0.0, 0.0)
    images: OtherRuns | None = None
    sequences: OtherRuns | None = None
    link: PositiveFloat | None = None
    measured: bool = False
    source: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.device == "cuda" and self.accelerator_memory is None:
            problem = "an accelerator has memory; say how much"
            raise InputError(problem, field="accelerator_memory", value=None)
        for name in ("", "images", "sequences"):
            of = getattr(self, name) if name else self
            if of is not None and of.kept[0] > of.kept[1]:
                field = f"{name}.kept".lstrip(".")
                raise InputError("the least comes first", field=field, value=list(of.kept))
        return self

    @property
    def record(self) -> MachineRecord:
        """What a record of this machine would hold; all that a run loads is in `base`."""
        return MachineRecord(0, self.kept, self.efficiency)

    def of_run(self, reads: Reads) -> Profile:
        """The profile as it holds for a run that reads this."""
        of = {"images": self.images, "sequences": self.sequences}.get(reads)
        return self if of is None else self.model_copy(update=dict(of))

    def machine(self, precision: str) -> Machine:
        """The machine, at the rate of a precision; the other one's where only that is known."""
        rates = {str(name): rate for name, rate in self.flops.items()}
        return Machine(
            processor=self.name,
            cores=1,
            threads=1,
            memory_bytes=self.memory,
            available_bytes=max(0, self.memory - self.base),
            accelerator=self.name if self.device == "cuda" else None,
            accelerator_bytes=self.accelerator_memory,
            flops=rates.get(precision, max(rates.values())),
        )

    def device_for(self, recipe: Recipe) -> str:
        """Where the recipe would run there.

        Raises:
            InputError: it asks for CUDA, and this machine has none; or for the processor, of which
                the profile of an accelerator says no rate.
        """
        wanted = recipe.training.device
        if wanted == "cpu" and self.device != "cpu":
            problem = f"the profile of {self.name} has its accelerator's rates, none of a processor"
            raise InputError(problem, field="training.device", value=wanted, allowed="auto, cuda")
        if wanted == "cuda" and self.device != "cuda":
            problem = f"{self.name} has no CUDA device"
            raise InputError(problem, field="training.device", value=wanted, allowed="auto, cpu")
        return self.device

    def described(self, wire_bytes: int) -> dict[str, Any]:
        """What a plan says of it.

        Args:
            wire_bytes: that a rank sends in an update.
        """
        seconds = None if self.link is None or not wire_bytes else wire_bytes / self.link
        return {
            "name": self.name,
            "measured": self.measured,
            "source": self.source,
            "wire_seconds": seconds,
        }


def shipped_profiles() -> dict[str, Path]:
    """The profiles that come with modicum, by name."""
    return {file.stem: file for file in sorted(_FOLDER.glob("*.json"))}


def profile(name: str) -> Profile:
    """A profile that ships with modicum.

    Raises:
        InputError: none has this name.

    >>> profile("rtx4090").accelerator_memory
    25769803776
    """
    known = shipped_profiles()
    if name not in known:
        raise InputError(
            "no such machine",
            field="--machine",
            value=name,
            allowed=f"{', '.join(known)}, or a file",
            candidates=known,
        )
    return profile_of(read_json(known[name]), known[name])


def profile_of(values: Any, file: str | Path) -> Profile:
    """The profile of plain values: its own fields, or all that `modicum bench machine` printed.

    Args:
        file: where they are from, for errors.

    Raises:
        InputError: names the file, the field, its value, and what is allowed.
    """
    if isinstance(values, Mapping) and isinstance(values.get("profile"), Mapping):
        values = values["profile"]
    if not isinstance(values, Mapping):
        problem = "not a machine: expected its fields, or what `modicum bench machine --json` said"
        raise InputError(problem, file=file)
    try:
        return Profile.model_validate(dict(values))
    except ValidationError as error:
        raise describe(error, Profile.model_fields, prefix="", file=file) from None
    except InputError as error:
        raise error.located(file=file) from None

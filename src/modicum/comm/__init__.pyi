# Written by scripts/stubs.py.
from modicum.comm.acp_sgd import ACPSGD as ACPSGD
from modicum.comm.base import Schedule as Schedule
from modicum.comm.base import ScheduleQuery as ScheduleQuery
from modicum.comm.base import Wrapped as Wrapped
from modicum.comm.c4 import C4 as C4
from modicum.comm.dear import DeAR as DeAR
from modicum.comm.dense_sums import DenseSums as DenseSums
from modicum.comm.powersgd import PowerSGD as PowerSGD
from modicum.comm.sdp4bit import SDP4Bit as SDP4Bit
from modicum.comm.watching import Watch as Watch
from modicum.comm.watching import watch as watch
from modicum.core.exports import Exports

EXPORTS: Exports

# Written by scripts/stubs.py.
from modicum.core.exports import Exports
from modicum.memory.activations import Activations as Activations
from modicum.memory.base import ActivationContext as ActivationContext
from modicum.memory.base import ActivationPolicy as ActivationPolicy
from modicum.memory.comet import COMET as COMET

EXPORTS: Exports

# Written by scripts/stubs.py.
from modicum.core.exports import Exports
from modicum.optim.adam_mini import AdamMini as AdamMini
from modicum.optim.adamw import AdamW as AdamW
from modicum.optim.adamw8bit import AdamW8bit as AdamW8bit
from modicum.optim.admm_rnn import ADMMRNN as ADMMRNN
from modicum.optim.auon import AuON as AuON
from modicum.optim.backward import step_in_backward as step_in_backward
from modicum.optim.base import MatrixOptimizer as MatrixOptimizer
from modicum.optim.cautious import Cautious as Cautious
from modicum.optim.dct_adamw import DCTAdamW as DCTAdamW
from modicum.optim.distzo2 import DistZO2 as DistZO2
from modicum.optim.eva import Eva as Eva
from modicum.optim.fair_optim import FairOptim as FairOptim
from modicum.optim.frugal import FRUGAL as FRUGAL
from modicum.optim.galore import GaLore as GaLore
from modicum.optim.kron import Kron as Kron
from modicum.optim.lion import Lion as Lion
from modicum.optim.mars import MARS as MARS
from modicum.optim.mkor import MKOR as MKOR
from modicum.optim.muon import Muon as Muon
from modicum.optim.nadamw import NAdamW as NAdamW
from modicum.optim.scion import Scion as Scion
from modicum.optim.sgd import SGD as SGD
from modicum.optim.soap import SOAP as SOAP
from modicum.optim.transform import GradientTransform as GradientTransform
from modicum.optim.transform import TransformContext as TransformContext
from modicum.optim.trion import Trion as Trion

EXPORTS: Exports

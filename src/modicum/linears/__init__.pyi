# Written by scripts/stubs.py.
from modicum.core.exports import Exports
from modicum.core.layers.form_layer import FormLayer as FormLayer
from modicum.core.layers.form_plan import FormPlan as FormPlan
from modicum.core.layers.formed_model import FormedModel as FormedModel
from modicum.core.layers.linear_forms import LinearForm as LinearForm
from modicum.core.layers.linear_forms import full_weight as full_weight
from modicum.core.layers.linear_forms import linear_form as linear_form
from modicum.core.layers.linear_forms import make_linear as make_linear
from modicum.core.layers.linear_forms import write_weight as write_weight
from modicum.linears.base import FormContext as FormContext
from modicum.linears.base import LinearMethod as LinearMethod
from modicum.linears.batch_norms import reestimate_batch_norms as reestimate_batch_norms
from modicum.linears.dense import Dense as Dense
from modicum.linears.fp16 import FP16 as FP16
from modicum.linears.fp16 import FP16Linear as FP16Linear
from modicum.linears.int8 import Int8 as Int8
from modicum.linears.int8 import Int8Linear as Int8Linear
from modicum.linears.lost import LOST as LOST
from modicum.linears.lost import LOSTLinear as LOSTLinear
from modicum.linears.low_rank import LowRank as LowRank
from modicum.linears.low_rank import LowRankLinear as LowRankLinear
from modicum.linears.low_rank import rank_surgery as rank_surgery
from modicum.linears.maestro import Maestro as Maestro
from modicum.linears.monarch import Monarch as Monarch
from modicum.linears.monarch import MonarchLinear as MonarchLinear
from modicum.linears.nf4 import NF4 as NF4
from modicum.linears.nf4 import NF4Linear as NF4Linear
from modicum.linears.ordered import OrderedLinear as OrderedLinear
from modicum.linears.ordered_convolution import OrderedConv2d as OrderedConv2d
from modicum.linears.ordered_steps import OrderedSteps as OrderedSteps
from modicum.linears.sst import SST as SST
from modicum.linears.sst import SSTLinear as SSTLinear
from modicum.linears.sst import SSTRounds as SSTRounds
from modicum.linears.tiles import TileLinear as TileLinear
from modicum.linears.tiles import Tiles as Tiles

EXPORTS: Exports

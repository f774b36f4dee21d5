# Written by scripts/stubs.py.
from modicum.compress.base import Compressor as Compressor
from modicum.compress.base import FittedLayer as FittedLayer
from modicum.compress.base import LayerCompressor as LayerCompressor
from modicum.compress.compressed_model import CompressedModel as CompressedModel
from modicum.compress.compressed_model import CompressionReport as CompressionReport
from modicum.compress.fwsvd import FWSVD as FWSVD
from modicum.compress.loading import load as load
from modicum.compress.low_rank_base import FactorCompressor as FactorCompressor
from modicum.compress.low_rank_base import LowRankCompressor as LowRankCompressor
from modicum.compress.pruned_model import PrunedModel as PrunedModel
from modicum.compress.pruned_model import PruningReport as PruningReport
from modicum.compress.pruned_parts import PrunedPart as PrunedPart
from modicum.compress.structured_pruning import StructuredPruning as StructuredPruning
from modicum.compress.unit_pruner import UnitPruner as UnitPruner
from modicum.compress.welore import WeLore as WeLore
from modicum.core.exports import Exports
from modicum.core.layers.calibration import Calibration as Calibration
from modicum.core.layers.calibration import calibrate as calibrate

EXPORTS: Exports

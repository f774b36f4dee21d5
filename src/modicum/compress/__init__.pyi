# Written by scripts/stubs.py.
from modicum.compress.base import Compressor as Compressor
from modicum.compress.base import FittedLayer as FittedLayer
from modicum.compress.compressed_model import CompressedModel as CompressedModel
from modicum.compress.compressed_model import CompressionReport as CompressionReport
from modicum.compress.compressed_model import load as load
from modicum.compress.fwsvd import FWSVD as FWSVD
from modicum.compress.low_rank_base import LowRankCompressor as LowRankCompressor
from modicum.core.exports import Exports
from modicum.core.layers.calibration import Calibration as Calibration
from modicum.core.layers.calibration import calibrate as calibrate

EXPORTS: Exports

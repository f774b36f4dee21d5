# Written by scripts/stubs.py.
from modicum.adapters.attached_adapter import AttachedAdapter as AttachedAdapter
from modicum.adapters.base import Adapter as Adapter
from modicum.adapters.base import AdapterLayer as AdapterLayer
from modicum.adapters.batch_rows import adapter_names as adapter_names
from modicum.adapters.block_lora import BlockLoRA as BlockLoRA
from modicum.adapters.compacter import Compacter as Compacter
from modicum.adapters.diffora import DiffoRA as DiffoRA
from modicum.adapters.dora import DoRA as DoRA
from modicum.adapters.files import load as load
from modicum.adapters.flylora import FlyLoRA as FlyLoRA
from modicum.adapters.hydra import Hydra as Hydra
from modicum.adapters.loldu import LoLDU as LoLDU
from modicum.adapters.lora import LoRA as LoRA
from modicum.adapters.lora_fa import LoRAFA as LoRAFA
from modicum.adapters.lora_limits import LoRALimits as LoRALimits
from modicum.adapters.lora_sb import LoRASB as LoRASB
from modicum.adapters.lora_xs import LoRAXS as LoRAXS
from modicum.adapters.loram import LoRAM as LoRAM
from modicum.adapters.mos import MoS as MoS
from modicum.adapters.mosa import MoSA as MoSA
from modicum.adapters.native_files import base_folder_of as base_folder_of
from modicum.adapters.native_files import base_model_of as base_model_of
from modicum.adapters.pissa import PiSSA as PiSSA
from modicum.adapters.q_bara import QBaRA as QBaRA
from modicum.adapters.qa_hira import QAHiRA as QAHiRA
from modicum.adapters.randlora import RandLoRA as RandLoRA
from modicum.adapters.s2ft import S2FT as S2FT
from modicum.adapters.salt import SALT as SALT
from modicum.adapters.shira import SHiRA as SHiRA
from modicum.adapters.snella import SNELLA as SNELLA
from modicum.adapters.soka import SoKA as SoKA
from modicum.adapters.svfit import SVFit as SVFit
from modicum.core.exports import Exports
from modicum.core.layers.taylor_attention import approx_attention as approx_attention

EXPORTS: Exports

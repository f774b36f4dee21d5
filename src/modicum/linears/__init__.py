"""Linear forms: modules in place of `nn.Linear`, each of which says what dense weight it is."""

from __future__ import annotations

from modicum.core.exports import Exports

EXPORTS = Exports(
    __name__,
    {
        "FP16Linear": "fp16",
        "FormLayer": "modicum.core.layers.form_layer",
        "FormPlan": "modicum.core.layers.form_plan",
        "FormedModel": "modicum.core.layers.formed_model",
        "Int8Linear": "int8",
        "FormContext": "base",
        "LOSTLinear": "lost",
        "LinearForm": "modicum.core.layers.linear_forms",
        "LinearMethod": "base",
        "LowRankLinear": "low_rank",
        "MonarchLinear": "monarch",
        "NF4Linear": "nf4",
        "OrderedConv2d": "ordered_convolution",
        "OrderedLinear": "ordered",
        "OrderedSteps": "ordered_steps",
        "SSTLinear": "sst",
        "SSTRounds": "sst",
        "TileLinear": "tiles",
        "full_weight": "modicum.core.layers.linear_forms",
        "linear_form": "modicum.core.layers.linear_forms",
        "make_linear": "modicum.core.layers.linear_forms",
        "rank_surgery": "low_rank",
        "reestimate_batch_norms": "batch_norms",
        "write_weight": "modicum.core.layers.linear_forms",
    },
)
__getattr__, __dir__ = EXPORTS.load, EXPORTS.names

"""DeepSeek-V4 outside this package: mHC parameters of checkpoints, and the blocks inside a model of transformers.

Parameters have names in four layouts; every conversion is a renaming of FP32 tensors, no value changes, NaN payloads
and the sign of zero included. The sources of the names are in ``names``. ``install`` is in ``adapter``; nothing else
here needs transformers, and importing this loads neither it nor ``ops``.
"""

from rl_engine.mhc.integrations.deepseek_v4.adapter import Installation, install
from rl_engine.mhc.integrations.deepseek_v4.checkpoint import read_checkpoint, write_checkpoint
from rl_engine.mhc.integrations.deepseek_v4.names import (
    ALPHAS,
    LAYOUTS,
    SUBLAYERS,
    Inventory,
    Layout,
    Site,
    Sublayer,
    controller_names,
    default_prefix,
    head_names,
    is_mhc_name,
    take_inventory,
)
from rl_engine.mhc.integrations.deepseek_v4.state_dict import (
    HeadParams,
    ModelParams,
    controllers_from_state_dict,
    convert_state_dict,
    head_from_state_dict,
    model_from_state_dict,
    state_dict_of,
)

__all__ = [
    "ALPHAS",
    "LAYOUTS",
    "SUBLAYERS",
    "HeadParams",
    "Installation",
    "Inventory",
    "Layout",
    "ModelParams",
    "Site",
    "Sublayer",
    "controller_names",
    "controllers_from_state_dict",
    "convert_state_dict",
    "default_prefix",
    "head_from_state_dict",
    "head_names",
    "install",
    "is_mhc_name",
    "model_from_state_dict",
    "read_checkpoint",
    "state_dict_of",
    "take_inventory",
    "write_checkpoint",
]

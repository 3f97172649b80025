"""mHC parameters of DeepSeek-V4 checkpoints: their names in three layouts, conversion, safetensors files.

Every conversion is a renaming of FP32 tensors; no value changes, NaN payloads and the sign of zero included. The
sources of the names are in ``names``.
"""

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
    "is_mhc_name",
    "model_from_state_dict",
    "read_checkpoint",
    "state_dict_of",
    "take_inventory",
    "write_checkpoint",
]

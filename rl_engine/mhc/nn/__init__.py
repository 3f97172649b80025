"""The block as modules: parameters that keep their dtype, the norm, the hyper-connection around a sublayer, the head.

Every byte is that of ``ops``, forward and backward, and so of the contract. Importing registers those operations.
"""

from __future__ import annotations

from rl_engine.mhc.nn.controller import MHCController
from rl_engine.mhc.nn.head import HyperHead
from rl_engine.mhc.nn.hyper_connection import HyperConnection, expand_streams
from rl_engine.mhc.nn.norm import RMSNorm

__all__ = ["HyperConnection", "HyperHead", "MHCController", "RMSNorm", "expand_streams"]

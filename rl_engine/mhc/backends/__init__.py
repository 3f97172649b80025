"""Backends: the contract's operators as kernels, each reached through ``resolve_provider``."""

"""The native CPU backend: C++ kernels behind a small C interface."""

"""Slow independent references for the operators of `rl_engine.mhc`.

`scalar` and `exact` follow the specification in exact arithmetic and import nothing of the package under test;
`autograd64` states the plain mathematics in FP64 and lets autograd find the gradients; `bridge` carries torch tensors
across and compares encodings.
"""

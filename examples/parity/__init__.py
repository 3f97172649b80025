"""The parts of ``examples/train_infer_parity.py``: one small language model in two arithmetics, and its scoring."""

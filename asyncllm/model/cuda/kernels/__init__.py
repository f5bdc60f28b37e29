"""Triton kernels, one file a purpose, and their plain torch twins in `reference.py`."""

"""The CPU's own kernels for bfloat16: C, compiled while an engine opens, for the processor it opens on."""

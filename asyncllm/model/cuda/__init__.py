"""The GPU's own path: Triton kernels, CUDA graphs, and the runner that replays them."""

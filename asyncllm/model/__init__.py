"""The device: weights, layers, attention, sampling; torch, and nothing of requests."""

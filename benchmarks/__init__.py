"""Measurements, each a command: see README.md beside."""

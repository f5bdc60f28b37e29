"""Structured output: which tokens may come next so that a text keeps to a schema, a pattern or a grammar."""

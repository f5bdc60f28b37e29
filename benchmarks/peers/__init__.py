"""One script for each engine, each run by an interpreter in which that engine is installed: see README.md beside."""

"""Measurements against what users would otherwise pick; each is `python -m benchmarks.NAME`."""

"""Merge models, add chat vectors, and quantize exports."""

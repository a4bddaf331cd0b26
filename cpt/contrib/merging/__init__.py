"""Merge models, add chat vectors, interpolate, and quantize exports."""

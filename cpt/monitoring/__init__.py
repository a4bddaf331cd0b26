"""Callbacks that watch a run and never change it."""

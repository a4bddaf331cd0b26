"""The record of each run: its folder, recipe, environment and outcome."""

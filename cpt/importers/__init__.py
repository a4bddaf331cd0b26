"""Recipes from the configs of axolotl and LLaMA-Factory."""

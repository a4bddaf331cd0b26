"""Recipes from the configs of axolotl, LLaMA-Factory and ms-swift."""

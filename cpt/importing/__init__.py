"""From a config of axolotl or LLaMA-Factory to a recipe, with what could not be carried over."""

"""The reality gate: check what a recipe refers to before anything is built."""

"""The reality gate: what a recipe refers to is looked at before anything is built."""

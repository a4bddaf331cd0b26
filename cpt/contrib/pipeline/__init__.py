"""Run several recipes, each from the model of the one before."""

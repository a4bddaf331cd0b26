"""The planner's sum beside a dry run of the whole step, over shipped models and ways to train them."""

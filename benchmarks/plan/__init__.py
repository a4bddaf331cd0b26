"""The planner's sum compared with a dry run of the whole step, for shipped models and training setups."""

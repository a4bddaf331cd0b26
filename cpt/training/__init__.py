"""The trainer: one class and the parts that save, resume, guard and watch its steps."""

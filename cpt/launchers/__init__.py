"""How a run's processes are started, and how they find each other."""

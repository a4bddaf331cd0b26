"""Whether the nodes of a run fit together, found before their GPUs are taken."""

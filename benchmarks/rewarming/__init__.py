"""The arms of arXiv 2403.08763: continue without re-warming, with it, with replay too, or train on everything from
scratch."""

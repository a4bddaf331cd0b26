"""One small program for each way that users would take instead of ours; none of them imports cpt."""

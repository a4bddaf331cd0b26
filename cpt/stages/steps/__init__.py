"""Steps that are judged before they count, and that fit into memory, on one process or many."""

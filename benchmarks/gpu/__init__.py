"""How fast a GPU trains: cpt beside a bare loop and beside Hugging Face's Trainer as people start it and as experts tune it."""

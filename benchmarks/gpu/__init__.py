"""How fast a GPU trains with cpt, a bare loop, and Hugging Face's Trainer with its defaults or set up by an expert."""

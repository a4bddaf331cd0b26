"""`cpt data`: check and preview the documents of a recipe, ingest documents that are not text yet, let a model rewrite
them."""

COMMANDS = {  # name -> module:function
    "check": "cpt.data_commands.check:check_command",
    "preview": "cpt.data_commands.preview:preview_command",
    "ingest": "cpt.data_commands.ingest:ingest_command",
    "rewrite": "cpt.data_commands.rewrite:rewrite_command",
}

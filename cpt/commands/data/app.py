"""`cpt data`: check and preview the documents of a recipe, ingest documents that are not text yet, let a model rewrite
them."""

COMMANDS = {  # name -> module:function
    "check": "cpt.commands.data.check:check_command",
    "preview": "cpt.commands.data.preview:preview_command",
    "ingest": "cpt.commands.data.ingest:ingest_command",
    "rewrite": "cpt.commands.data.rewrite:rewrite_command",
}

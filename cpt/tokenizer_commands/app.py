"""`cpt tokenizer`: train one, see how it fits a text, extend it for a domain."""

COMMANDS = {  # name -> module:function
    "report": "cpt.tokenizer_commands.report:report_command",
    "extend": "cpt.tokenizer_commands.extend:extend_command",
    "train": "cpt.tokenizer_commands.train:train_command",
}

"""`cpt tokenizer`: train one, see how it fits a text, extend it for a domain."""

COMMANDS = {  # name -> module:function
    "report": "cpt.commands.tokenizer.report:report_command",
    "extend": "cpt.commands.tokenizer.extend:extend_command",
    "train": "cpt.commands.tokenizer.train:train_command",
}

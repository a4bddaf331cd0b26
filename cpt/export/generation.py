"""The end of the generation of an exported model: after a turn of the assistant too, if it was trained on chats."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cpt.recipe.schema import Recipe
from cpt.stages.models import ends_of_answers

FILE = "generation_config.json"


def end_at_turns(folder: Path, tokenizer: PreTrainedTokenizerBase, recipe: Recipe | None) -> None:
    """Add the token that ends a turn, and the tokenizer's EOS, to the `eos_token_id` of a model trained on chats.

    A base's config ends at its documents' EOS only; a server would write the user's next turn too.
    """
    if recipe is None:
        return
    path = folder / FILE
    config = json.loads(path.read_text()) if path.is_file() else {}
    eos_token_id = config.get("eos_token_id")
    ends = ends_of_answers(eos_token_id, tokenizer, recipe)
    if ends != eos_token_id:
        config["eos_token_id"] = ends
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

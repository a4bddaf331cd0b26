"""Where the generation of an exported model ends: after a turn of the assistant too, if it was trained on chats."""

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
    path = folder / FILE
    content = json.loads(path.read_text()) if path.is_file() else {}
    known = content.get("eos_token_id")
    ends = known if recipe is None else ends_of_answers(known, tokenizer, recipe)
    if ends != known:
        content["eos_token_id"] = ends
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

"""Where the generation of an exported model ends: after a turn of the assistant too, if it was trained on chats."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cpt.data.examples.chat_template import ChatTemplate
from cpt.data.readers.columns import form_of_stage
from cpt.recipe.schema import Recipe

FILE = "generation_config.json"


def end_at_turns(folder: Path, tokenizer: PreTrainedTokenizerBase, recipe: Recipe | None) -> None:
    """Add the token that ends a turn, and the tokenizer's EOS, to the `eos_token_id` of a model trained on chats.

    A base's config ends at its documents' EOS only; a server would write the user's next turn too.
    """
    end = turn_end(tokenizer)
    if recipe is None or end is None or not learns_chats(recipe):
        return
    path = folder / FILE
    content = json.loads(path.read_text()) if path.is_file() else {}
    known = content.get("eos_token_id")
    ends = known if isinstance(known, list) else [known]
    ends = [token for token in (*ends, tokenizer.eos_token_id, end) if token is not None]
    content["eos_token_id"] = list(dict.fromkeys(ends))
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of the token after the assistant's words in the chat template; None without template or token."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template is None:
        return None
    added = tokenizer.added_tokens_decoder.items()
    control = {token.content: number for number, token in added if token.special}
    names = tokenizer.all_special_tokens
    control |= dict(zip(names, tokenizer.all_special_ids, strict=True))
    name = ChatTemplate(template, tokenizer.special_tokens_map, sorted(control)).turn_end
    return None if name is None else control[name]


def learns_chats(recipe: Recipe) -> bool:
    return form_of_stage(recipe.stage) != "document" or any(
        source.chat for source in recipe.data.sources
    )

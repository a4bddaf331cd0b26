"""A model trained on chats stops after its turn, whatever ended the texts of its base."""

import json

import pytest
from tiny import write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from cpt.data.examples.chat_template import turn_end
from cpt.export.generation import end_at_turns
from cpt.recipe.load import load_recipe
from cpt.train import train

CHATML = (
    "{% for message in messages %}<turn>{{ message.role }}\n{{ message.content }}<turn_end>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes."}]


@pytest.fixture
def base(base_folder, tmp_path):
    """A base whose texts end with another token than the turns of its template."""
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>", "<turn_end>"]})
    tokenizer.chat_template = CHATML
    model = AutoModelForCausalLM.from_pretrained(base_folder)
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<turn_end>"),
        (CHATML.replace("<turn_end>\n", "{{ eos_token }}"), "eos"),
        (CHATML.replace("<turn>", "### ").replace("<turn_end>", "\n"), None),
        ("{{ raise_exception('no') }}", None),
        (None, None),
    ],
)
def test_the_token_that_ends_a_turn_is_that_of_the_template(base, template, end):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = template
    name = tokenizer.eos_token if end == "eos" else end
    assert turn_end(tokenizer) == (None if name is None else tokenizer.vocab[name])


def finish_run(tiny_recipe, base, tmp_path, *, stage, epochs):
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 16)
    sections = {
        **tiny_recipe,
        "stage": stage,
        "model": {"path": str(base)},
        "tokenizer": {"path": str(base)},
        "data": {"sequence_length": 64, "sources": [{"path": str(tmp_path / "chats.jsonl")}]},
        "budget": {"epochs": epochs},
        "optimizer": {"learning_rate": 0.01},
    }
    sections["data"]["sources"][0] |= {"chat": "messages"} if stage == "cpt" else {}
    return train(load_recipe(write_recipe(sections, tmp_path / "recipe.yaml")))


@pytest.mark.heavy
def test_a_run_on_chats_adds_the_end_of_a_turn_to_the_ends(tiny_recipe, base, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    ends = [tokenizer.eos_token_id, tokenizer.vocab["<turn_end>"]]
    for stage in ("sft", "cpt"):
        tiny_recipe["name"] = stage
        folder = finish_run(tiny_recipe, base, tmp_path, stage=stage, epochs=1)
        assert GenerationConfig.from_pretrained(folder).eos_token_id == ends


@pytest.mark.parametrize(
    ("known", "chats", "expected"),
    [(7, True, [7, 2, 322]), ([7, 9], True, [7, 9, 2, 322]), (7, False, 7), (None, True, [2, 322])],
)
def test_only_a_model_that_learned_chats_ends_at_turns(
    tiny_recipe, base, tmp_path, known, chats, expected
):
    tokenizer = AutoTokenizer.from_pretrained(base)
    expected = (
        [
            {2: tokenizer.eos_token_id, 322: tokenizer.vocab["<turn_end>"]}.get(x, x)
            for x in expected
        ]
        if isinstance(expected, list)
        else expected
    )
    sections = {**tiny_recipe, "stage": "sft" if chats else "cpt", "model": {"path": str(base)}}
    recipe = load_recipe(write_recipe(sections, tmp_path / "recipe.yaml"))
    path = tmp_path / "generation_config.json"
    if known is not None:
        path.write_text(json.dumps({"eos_token_id": known, "do_sample": True}))
        end_at_turns(tmp_path, tokenizer, None)  # no run, no change
        assert json.loads(path.read_text()) == {"eos_token_id": known, "do_sample": True}
    end_at_turns(tmp_path, tokenizer, recipe)
    others = {} if known is None else {"do_sample": True}
    assert json.loads(path.read_text()) == {"eos_token_id": expected, **others}


@pytest.mark.slow
def test_generation_stops_after_the_turn(tiny_recipe, base, tmp_path):
    folder = finish_run(tiny_recipe, base, tmp_path, stage="sft", epochs=60)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_tensors="pt")
    written = model.generate(**ids, max_new_tokens=40)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(written) == "yes.<turn_end>"

import pytest
import torch
from openai import BadRequestError, OpenAI
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.checkpoints.proven_export import Wish, export_whole
from cpt.checkpoints.trained import find_trained
from cpt.errors import LaunchError
from cpt.models.build import build_model
from cpt.recipe.schema import Model
from cpt.serving.chat import free_port
from cpt.serving.checks import check_servable
from cpt.serving.server import serving

PROMPT = "the model reads"


def greedy(folder, prompt, tokens):
    """What transformers itself writes."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    written = model.generate(**ids, do_sample=False, max_new_tokens=tokens)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(written, skip_special_tokens=True)


def served(folder):
    return serving(check_servable(str(folder)), host="127.0.0.1", port=free_port(), dtype="auto", device="cpu")


def test_the_openai_client_gets_chat_and_completions_whole_and_streamed(chat_folder):
    name, expected = str(chat_folder), greedy(chat_folder, PROMPT, 8)
    with served(chat_folder) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == [name]
        options = {"model": name, "max_tokens": 8, "temperature": 0}
        whole = client.completions.create(prompt=PROMPT, **options)
        assert whole.choices[0].text == expected and whole.usage.completion_tokens == 8
        parts = [part.choices[0].text for part in client.completions.create(prompt=PROMPT, stream=True, **options)]
        assert len(parts) > 1 and "".join(parts) == expected
        messages = [{"role": "user", "content": PROMPT}]
        answer = client.chat.completions.create(messages=messages, **options).choices[0].message.content
        pieces = [
            part.choices[0].delta.content or ""
            for part in client.chat.completions.create(messages=messages, stream=True, **options)
        ]
        assert answer == "".join(pieces) and answer
        with pytest.raises(BadRequestError) as refused:
            client.completions.create(model="another", prompt=PROMPT)
        assert name in refused.value.response.text


def test_what_the_server_cannot_do_is_refused_by_name(chat_folder):
    name = str(chat_folder)
    with served(chat_folder) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for options in (
            {"n": 2},
            {"logprobs": 3},
            {"echo": True},
            {"logit_bias": {"5": 1}},
            {"prompt": ["a", "b"]},
            {"temperature": 3},
        ):
            with pytest.raises(BadRequestError, match=f"`{next(iter(options))}`"):
                client.completions.create(**{"model": name, "prompt": PROMPT, **options})
        messages = [{"role": "user", "content": PROMPT}]
        for options in (
            {"n": 2},
            {"logprobs": True},
            {"presence_penalty": 1},
            {"response_format": {"type": "json_object"}},
            {"messages": []},
        ):
            with pytest.raises(BadRequestError, match=f"`{next(iter(options))}`"):
                client.chat.completions.create(**{"model": name, "messages": messages, **options})
        with pytest.raises(BadRequestError, match="99999"):
            client.chat.completions.create(model=name, messages=messages, logit_bias={"99999": 1})


def test_what_the_server_honours(chat_folder):
    name = str(chat_folder)
    with served(chat_folder) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def complete(**options):
            return (
                client.completions.create(**{"model": name, "prompt": PROMPT, "max_tokens": 8, **options})
                .choices[0]
                .text
            )

        greedy_text = complete()
        assert complete(prompt=[PROMPT], n=1, user="me", stop=None) == greedy_text
        assert len({complete(temperature=1.5, seed=seed) for seed in (1, 2, 3)} | {greedy_text}) > 1, (
            "a temperature samples"
        )
        assert complete(temperature=1.5, seed=1) == complete(temperature=1.5, seed=1)
        messages = [{"role": "user", "content": PROMPT}]
        biased = client.chat.completions.create(model=name, messages=messages, max_tokens=4, logit_bias={"40": 100})
        assert len(set(biased.choices[0].message.content)) == 1, "the biased token alone"
        assert client.responses.create(model=name, input=PROMPT, max_output_tokens=4).output_text


def test_a_model_without_a_chat_template_completes_and_says_so_to_who_wants_to_chat(plain_folder):
    with served(plain_folder) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(BadRequestError, match="no chat template.*Ask /v1/completions"):
            client.chat.completions.create(model=str(plain_folder), messages=[{"role": "user", "content": PROMPT}])
        assert client.completions.create(model=str(plain_folder), prompt=PROMPT, max_tokens=3).choices[0].text


def test_what_hugging_face_cannot_load_is_told(chat_folder):
    with (
        pytest.raises(LaunchError, match="cannot load .*chat"),
        serving(check_servable(str(chat_folder)), host="127.0.0.1", port=free_port(), dtype="bfloat17", device="cpu"),
    ):
        pass


@pytest.mark.slow
def test_a_minimind_exported_natively_is_served(tokenizer_folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(0)
    build_model(
        Model(from_scratch=True, config=tiny_config("minimind3") | {"vocab_size": 320}), tokenizer
    ).save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    list(export_whole(find_trained(tmp_path / "ours"), tmp_path / "native", Wish(torch.float32)))
    with served(tmp_path / "native") as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        parts = client.completions.create(
            model=str(tmp_path / "native"), prompt=PROMPT, max_tokens=8, temperature=0, stream=True
        )
        assert "".join(part.choices[0].text for part in parts) == greedy(tmp_path / "native", PROMPT, 8)

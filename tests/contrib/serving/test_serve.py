"""`cpt serve` and `cpt chat`: Hugging Face's server as OpenAI's client sees it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.contrib.serving.serve import build_page, check_servable, serving
from cpt.errors import LaunchError
from cpt.process import free_port

pytestmark = pytest.mark.heavy
PROMPT = "the model reads"
MESSAGES = [{"role": "user", "content": PROMPT}]


def greedy(folder):
    """What transformers itself writes."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    ids = tokenizer(PROMPT, return_tensors="pt")
    written = model.generate(**ids, do_sample=False, max_new_tokens=8)[
        0, ids["input_ids"].shape[1] :
    ]
    return tokenizer.decode(written, skip_special_tokens=True)


def served(folder, dtype="auto"):
    return serving(
        *check_servable(str(folder)), host="127.0.0.1", port=free_port(), dtype=dtype, device="cpu"
    )


@pytest.fixture(scope="module")
def openai():
    """Imported here: it takes a second in each process that only collects tests."""
    import openai

    return openai


@pytest.fixture(scope="module")
def client(chat_folder, openai):
    with served(chat_folder) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_chat_and_completions_come_whole_and_streamed(client, openai, chat_folder):
    name, expected = str(chat_folder), greedy(chat_folder)
    assert [model.id for model in client.models.list()] == [name]
    options = {"model": name, "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(prompt=PROMPT, **options)
    assert whole.choices[0].text == expected and whole.usage.completion_tokens == 8
    parts = [
        part.choices[0].text
        for part in client.completions.create(prompt=PROMPT, stream=True, **options)
    ]
    assert len(parts) > 1 and "".join(parts) == expected
    answer = client.chat.completions.create(messages=MESSAGES, **options).choices[0].message.content
    streamed = client.chat.completions.create(messages=MESSAGES, stream=True, **options)
    assert answer == "".join(part.choices[0].delta.content or "" for part in streamed) and answer
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="another", prompt=PROMPT)


@pytest.mark.parametrize(
    "options",
    [{"n": 2}, {"logprobs": 0}, {"echo": True}, {"presence_penalty": 1}, {"prompt": ["a", "b"]}],
)
def test_a_parameter_that_the_server_would_ignore_is_refused_by_name(
    client, openai, chat_folder, options
):
    with pytest.raises(openai.BadRequestError, match=f"`{next(iter(options))}`"):
        client.completions.create(**{"model": str(chat_folder), "prompt": PROMPT, **options})


def test_openais_parameters_mean_what_openai_says(client, chat_folder):
    def complete(**options):
        options = {"model": str(chat_folder), "prompt": PROMPT, "max_tokens": 8, **options}
        return client.completions.create(**options).choices[0].text

    first = complete()
    assert complete(prompt=[PROMPT], n=1, user="me", stop=None) == first
    sampled = {seed: complete(temperature=1.5, seed=seed) for seed in (1, 2, 3)}
    assert len({*sampled.values(), first}) > 1, "a temperature samples"
    assert complete(temperature=1.5, seed=1) == sampled[1]
    biased = client.chat.completions.create(
        model=str(chat_folder), messages=MESSAGES, max_tokens=4, logit_bias={"40": 100}
    )
    assert len(set(biased.choices[0].message.content)) == 1, "only the biased token"


def test_a_seed_decides_the_answer_also_among_concurrent_requests(client, chat_folder):
    def ask(seed):
        options = {
            "model": str(chat_folder),
            "messages": MESSAGES,
            "max_tokens": 12,
            "temperature": 1.5,
            "seed": seed,
        }
        return client.chat.completions.create(**options).choices[0].message.content

    alone = [ask(seed) for seed in range(12)]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == alone and len(set(alone)) > 6


def test_a_model_without_a_chat_template_completes_and_refuses_chats(openai, plain_folder):
    with served(plain_folder) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="/v1/completions"):
            client.chat.completions.create(model=str(plain_folder), messages=MESSAGES)
        assert (
            client.completions.create(model=str(plain_folder), prompt=PROMPT, max_tokens=3)
            .choices[0]
            .text
        )


def test_a_model_that_the_server_cannot_load_is_named(chat_folder):
    with pytest.raises(LaunchError, match="chat"), served(chat_folder, dtype="bfloat17"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chat_folder", "plain_folder"])
def test_the_page_of_the_chat_answers_with_the_served_model(kind, request):
    from gradio_client import Client

    model = check_servable(str(request.getfixturevalue(kind)))
    with served(model.name) as url:
        page, port = build_page(model, url), free_port()
        page.launch(server_port=port, prevent_thread_lock=True, quiet=True, ssr_mode=False)
        try:
            answer = Client(f"http://127.0.0.1:{port}", verbose=False).predict(
                PROMPT, api_name="/chat"
            )
        finally:
            page.close(verbose=False)
    assert answer and (kind == "chat_folder" or answer.startswith(PROMPT))

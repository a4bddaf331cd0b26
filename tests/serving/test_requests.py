from typing import get_type_hints

import pytest
from openai.types import completion_create_params, responses
from openai.types.chat import completion_create_params as chat_params

from cpt.serving.requests import FOR_OPENAI, WITHOUT_EFFECT, Answer, Chat, Completion, refusal

NEEDED = {Completion: {"prompt": "a"}, Chat: {"messages": [{"role": "user", "content": "a"}]}, Answer: {"input": "a"}}
OF_OPENAI = {
    Completion: completion_create_params.CompletionCreateParamsBase,
    Chat: chat_params.CompletionCreateParamsBase,
    Answer: responses.response_create_params.ResponseCreateParamsBase,
}


@pytest.mark.parametrize("parameters", OF_OPENAI)
def test_every_parameter_of_openai_is_honoured_or_refused_by_name(parameters):
    names = set(get_type_hints(OF_OPENAI[parameters])) - parameters.model_fields.keys() - set(FOR_OPENAI)
    assert names
    for name in names:
        assert f"`{name}`" in refusal({**NEEDED[parameters], name: "something"}, parameters)
        for value in WITHOUT_EFFECT.get(name, ()):
            assert not refusal({**NEEDED[parameters], name: value}, parameters)


def test_zero_logprobs_are_a_request_and_false_is_none():
    assert refusal({"prompt": "a", "logprobs": 0}, Completion) and not refusal(
        {"prompt": "a", "logprobs": False}, Completion
    )

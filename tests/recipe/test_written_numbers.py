"""Units and bounds of every number in a recipe."""

import pytest

from cpt.recipe.schema import Budget, Data


@pytest.mark.parametrize(
    ("written", "number"), [("500M", 5 * 10**8), ("1.5B", 1_500_000_000), ("2T", 2 * 10**12), ("10 k", 10_000)]
)
def test_a_number_of_tokens_may_have_a_unit(written, number):
    assert Budget(tokens=written).tokens == number


@pytest.mark.parametrize(
    ("written", "number"), [("20GB", 2 * 10**10), ("16GiB", 2**34), ("64 kB", 64_000), (1e6, 10**6)]
)
def test_a_number_of_bytes_may_have_a_unit(written, number):
    assert Data(sources=[{"path": "a"}], window_bytes=written).window_bytes == number


WRONG = [
    *(("budget.tokens", text) for text in ("2GB", "1.5", "0.0001k", "'3'", "1X", "-1M", ".nan", "0")),
    *(("data.window_bytes", text) for text in ("20M", "1k", "-5")),
    *(("data.sequence_length", text) for text in ("4K", "4KB", "1", "1e12")),
    *(("model.rope", text) for text in ("{theta: .nan}", "{theta: 1e6, length: 32K}", "{type: yarn, factor: 0.5}")),
    *(("checkpoints.every_steps", text) for text in ("1k", "0")),
    *(("optimizer.learning_rate", text) for text in ("1e5", "0", ".nan")),
    ("data.sources.0.max_documents", "20GB"),
    ("evaluation.retain", "{general: 2}"),
    ("data.max_bad_share", "1.5"),
    ("data.sources.0.weight", ".inf"),
    ("monitoring.profile", "0"),
    ("training.max_grad_norm", ".nan"),
    *(("optimizer", text) for text in ("{weight_decay: .nan}", "{betas: [0.9, 95]}", "{embedding_learning_rate: 2}")),
    ("optimizer", "{name: 'my.module:sophia', rho: .nan}"),
    *(("schedule", text) for text in ("{warmup_tokens: 2GB}", "{warmup_tokens: -5}", "{floor: 5}")),
    ("schedule", "{name: continued, schedule: {name: wsd, decay_tokens: 1MB}, trained_tokens: 1M}"),
    ("safety.loss_guard", "{window: 2}"),
    ("checkpoints.keep", "{last: 0}"),
]


@pytest.mark.parametrize(("key", "text"), WRONG)
def test_a_wrong_unit_or_a_number_out_of_bounds_is_refused_when_the_recipe_is_read(mistakes, key, text):
    assert any(f"`: `{key.replace('.0.', '[0].')}" in line for line in mistakes("", f"{key}={text}"))


@pytest.mark.parametrize(
    ("override", "section", "option", "number"),
    [
        ("schedule={warmup_tokens: 20M}", "schedule", "warmup_tokens", 20_000_000),
        ("schedule={name: 'my.module:own', rest_tokens: 2k}", "schedule", "rest_tokens", 2000),
        ("optimizer={name: 'my.module:own', state_bytes: 1GiB}", "optimizer", "state_bytes", 2**30),
    ],
)
def test_options_that_are_counts_may_have_units(load, override, section, option, number):
    assert getattr(load("", override), section).options[option] == number

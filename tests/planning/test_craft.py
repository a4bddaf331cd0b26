import pytest

from cpt.planning.gate import check_reality, craft_warnings
from cpt.recipe.schema import Recipe


def recipe(**sections) -> Recipe:
    sound = {
        "name": "r",
        "model": {"path": "meta-llama/Llama-2-7b-hf"},
        "data": {
            "sources": [{"path": "mine", "weight": 0.95}, {"path": "general-replay", "weight": 0.05}],
            "sequence_length": 4096,
        },
        "budget": {"tokens": 10**9, "global_batch_tokens": 2**20},
        "optimizer": {"learning_rate": 3e-5},
        "schedule": {"name": "rewarm_cosine", "warmup_tokens": 10**7},
    }
    return Recipe.model_validate({**sound, **sections})


def warnings(**sections) -> list[str]:
    return craft_warnings(recipe(**sections), 6_700_000_000, 4096)


def sources(replayed: float) -> dict:
    return {"sources": [{"path": "mine", "weight": 1 - replayed}, {"path": "general-replay", "weight": replayed}]}


@pytest.mark.parametrize(
    ("sections", "warning"),
    [
        ({"optimizer": {"learning_rate": 4e-4}}, "0.0003 (arXiv 2307.09288)"),
        ({"optimizer": {"learning_rate": 1e-7}}, "`optimizer.learning_rate` is 1e-07"),
        ({"model": {"path": "a/b"}, "optimizer": {"learning_rate": 1e-3}}, "above the largest peak published"),
        ({"model": {"path": "a/b", "lora": {}}, "optimizer": {"learning_rate": 1e-3}}, "LoRA was swept from 1e-05 to 0.0005"),  # noqa: E501
        ({"model": {"path": "a/b", "lora": "cpt"}, "optimizer": {"learning_rate": 1e-4}}, "`optimizer.embedding_learning_rate: 1e-05`"),  # noqa: E501
        ({"optimizer": {"learning_rate": 1e-5, "embedding_learning_rate": 1e-4}}, "`optimizer.embedding_learning_rate`"),  # noqa: E501
        ({"data": {"sources": [{"path": "mine"}]}}, "`data.sources`"),
        ({"data": sources(0.001)}, "0.1 % is replayed"),
        ({"data": sources(0.6)}, "60 % is replayed"),
        ({"schedule": {"name": "cosine"}}, "`schedule.warmup_tokens` is missing"),
        ({"schedule": {"name": "cosine", "warmup_tokens": 2 * 10**8}}, "is 20 % of the budget"),
        ({"data": {**sources(0.05), "sequence_length": 8192}}, "4,096 positions"),
        ({"budget": {"tokens": 10**9, "global_batch_tokens": 2**24}}, "more than twice the base's own 4,194,304"),
    ],
)  # fmt: skip
def test_one_thing_outside_its_band_is_one_warning_with_its_source(sections, warning):
    found = warnings(**sections)
    assert len(found) == 1 and warning in found[0], found


def test_pre_training_is_not_judged_by_the_bands_of_continuing():
    assert (
        warnings(
            stage="pretrain",
            model={"from_scratch": True, "config": {"model_type": "llama"}},
            schedule={"name": "cosine"},
        )
        == []
    )


def test_a_rate_for_embeddings_that_adapters_leave_alone_is_a_mistake(load):
    """`from_scratch` stands for weights that would have to be read."""
    both = load(optimizer={"learning_rate": 1e-4, "embedding_learning_rate": 1e-5})

    def mistakes_with(lora: dict) -> list[str]:
        return [
            str(each)
            for each in check_reality(
                both.model_copy(update={"model": both.model.model_copy(update={"lora": lora})})
            ).mistakes
        ]

    assert "`optimizer.embedding_learning_rate`" in mistakes_with({})[0]
    assert mistakes_with({"preset": "cpt"}) == mistakes_with({"target_modules": ["embed_tokens", "q_proj"]}) == []

import pytest
import yaml

from cpt.init.choices import choose
from cpt.init.writing import comment, number, plain, recipe_text
from cpt.planner.target import find_target
from cpt.recipe.load import load_recipe


@pytest.fixture
def text_of(base_of, facts, estimate, tmp_path):
    def of(shape="0.5b", gpu="RTX 4090", gpus=1, host=64.0, path="some/base", **options):
        base, target = base_of(shape, path), find_target(gpu, gpus, host)
        choices = choose(facts, estimate, base, target, **options)
        text = recipe_text(
            facts, estimate, base, target, choices, output=tmp_path / "r.yaml", general=None, price_per_gpu_hour=2.0
        )
        (tmp_path / "r.yaml").write_text(text)
        return text, load_recipe(tmp_path / "r.yaml")

    return of


@pytest.mark.long
def test_8b_on_a_desktop_becomes_adapters_with_the_reason(text_of):
    text, recipe = text_of("8b")
    assert recipe.model.lora == {"r": 64, "lora_alpha": 16, "use_rslora": True}
    flat = " ".join(line.strip("# ") for line in text.splitlines())
    assert (
        "Adapters, since by estimate training all parameters with ds_config_8b_24gb.json needs" in flat
        and "139 GiB of host memory, there is 64" in flat
    )


@pytest.mark.slow
def test_the_same_with_a_large_host_becomes_all_parameters_with_its_profile(text_of):
    text, recipe = text_of("8b", host=192.0)
    assert recipe.model.lora is None and recipe.training["deepspeed"].endswith("ds_config_8b_24gb.json")
    assert "139 GiB of host memory, of 192" in " ".join(line.strip("# ") for line in text.splitlines())


@pytest.mark.long
def test_adapters_with_embeddings_get_the_smaller_rate(text_of):
    _, recipe = text_of("8b", "H100")
    assert recipe.model.lora == {"preset": "cpt"}
    assert recipe.optimizer.options["embedding_learning_rate"] == pytest.approx(recipe.optimizer.learning_rate / 10)


def test_several_gpus_are_started_by_accelerate(text_of):
    text, recipe = text_of("8b", "A100-80GB", gpus=4, host=512.0)
    assert "accelerate launch --num_processes 4 cpt/train.py" in text and recipe.training["deepspeed"].endswith(
        "ds_config_zero1.json"
    )


@pytest.mark.slow
def test_a_row_that_cannot_be_packed_is_a_batch(text_of):
    _, recipe = text_of("mamba")
    assert recipe.data.packing == "token_budget" and recipe.training["per_device_train_batch_size"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "docs/*.jsonl",
        "a: b",
        "null",
        "7",
        "my docs",
        "./x",
        "~/x",
        "-x",
        "Ü",
        "#x",
        "a#b",
        "true",
        "x.yaml",
        "1e5",
        ".5",
        "../x",
    ],
)
def test_any_path_survives_yaml(text):
    assert yaml.safe_load(f"path: {plain(text)}") == {"path": text}


@pytest.mark.parametrize(("value", "written"), [(1e-5, "1e-5"), (3e-4, "3e-4"), (0.00025, "2.5e-4"), (1.0, "1e0")])
def test_rates_are_written_as_people_write_them(value, written):
    assert number(value) == written and float(written) == value


def test_comments_are_wrapped_and_indented():
    lines = comment("word " * 60, 4).splitlines()
    assert len(lines) > 1 and all(line.startswith("    # word") and len(line) <= 118 for line in lines)

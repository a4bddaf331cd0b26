import pytest
import torch
import yaml
from run_folders import write_run
from tiny_checkpoints import save_adapter, save_llama
from typer.testing import CliRunner

from cpt.cli import application
from cpt.errors import CheckpointError, CptError, ResourceError
from cpt.serving import sides
from cpt.serving.sides import check_memory, load_sides, place_of


@pytest.fixture(scope="module")
def run(plain_folder, tokenizer_folder, tmp_path_factory):
    """A finished run that began with the plain model."""
    began = {"model": {"path": str(plain_folder)}, "training": {"per_device_train_batch_size": 4}}
    folder = write_run(tmp_path_factory.mktemp("runs") / "chemist", lambda recipe, **_: recipe.update(began))
    (save_llama(folder / "final", tokenizer_folder, seed=2) / "chat_template.jinja").unlink()
    return folder


@pytest.fixture(scope="module")
def adapter(plain_folder, tmp_path_factory):
    return save_adapter(tmp_path_factory.mktemp("adapters") / "adapter", plain_folder)


def logits(side):
    with torch.inference_mode(), side.speaking():
        return side.model(torch.tensor([[5, 6, 7, 8]])).logits


def weights(side):
    return {parameter.data_ptr() for parameter in side.model.parameters()}


def test_a_run_stands_beside_the_base_that_it_began_with(run, plain_folder):
    base, trained = load_sides(str(run))
    assert (base.title, base.name, trained.title, trained.name) == (
        "Base",
        str(plain_folder),
        "Trained",
        str(run / "final"),
    )
    assert not torch.equal(logits(base), logits(trained)) and not base.has_template
    assert not weights(base) & weights(trained)


def test_an_adapter_and_its_base_are_in_memory_once(adapter, plain_folder):
    base, trained = load_sides(str(adapter))
    (alone,) = load_sides(str(plain_folder))
    assert weights(base) == weights(trained)
    assert torch.equal(logits(base), logits(alone)) and not torch.equal(logits(base), logits(trained))


def test_an_adapter_beside_another_model_has_memory_of_its_own(adapter, chat_folder):
    other, trained = load_sides(str(adapter), str(chat_folder))
    assert other.name == str(chat_folder) and other.has_template and not weights(other) & weights(trained)


def test_alone_a_run_has_one_side(run):
    assert [side.title for side in load_sides(str(run), alone=True)] == ["Trained"]


def test_a_model_of_which_no_base_is_known_stands_alone(plain_folder):
    assert [side.title for side in load_sides(str(plain_folder))] == ["Model"]


def test_a_base_that_is_gone_is_told_with_the_ways_on(run, tmp_path):
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["model"]["path"] = "./gone"
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "status.json").write_text((run / "status.json").read_text())
    (tmp_path / "final").symlink_to(run / "final")
    with pytest.raises(
        CptError, match=r"the base of .*gone does not exist.* Name it with --against MODEL, or leave it out: --alone"
    ):
        load_sides(str(tmp_path))


def test_weights_are_held_in_the_dtype_that_is_asked_for(plain_folder):
    (side,) = load_sides(str(plain_folder), dtype="bfloat16")
    assert side.model.dtype == torch.bfloat16 and torch.isfinite(logits(side)).all()


def test_two_models_that_do_not_fit_are_refused_before_any_weights_are_read(run, monkeypatch):
    monkeypatch.setattr(sides, "free_gib", lambda device: 0.0002)
    monkeypatch.setattr(sides, "loaded", None)
    with pytest.raises(
        ResourceError, match=r"show one model \(--alone\), hold the weights in fewer bytes \(--dtype bfloat16\)"
    ):
        load_sides(str(run))


def test_memory_is_counted_in_the_dtype_of_the_weights(plain_folder, monkeypatch):
    size = sides.size_gib(place_of(str(plain_folder)), "auto")
    assert sides.size_gib(place_of(str(plain_folder)), "bfloat16") == size / 2
    numbers = sum(parameter.numel() for parameter in load_sides(str(plain_folder))[0].model.parameters())
    assert size == 4 * numbers / 2**30
    monkeypatch.setattr(sides, "free_gib", lambda device: 1.11 * size)
    check_memory([place_of(str(plain_folder))], "auto", torch.device("cpu"))


def test_a_reward_model_is_refused(adapter, tmp_path):
    for file in adapter.iterdir():
        text = file.read_bytes()
        (tmp_path / file.name).write_bytes(
            text.replace(b'"CAUSAL_LM"', b'"SEQ_CLS"') if file.name == "adapter_config.json" else text
        )
    with pytest.raises(CheckpointError, match="is a reward model: it gives scores and writes nothing"):
        place_of(str(tmp_path))


def test_a_device_that_is_not_there_is_refused(plain_folder):
    with pytest.raises(ResourceError, match="--device nowhere: .* Use --device auto, or cpu."):
        load_sides(str(plain_folder), device="nowhere")


@pytest.mark.parametrize("words", [["--against", "x"], ["--alone"], ["--port", "9999"]])
def test_options_of_the_page_want_the_page(plain_folder, words):
    result = CliRunner().invoke(application("chat"), ["chat", str(plain_folder), *words])
    assert "are of the page in the browser. Add --browser." in str(result.exception)

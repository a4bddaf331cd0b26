import subprocess
import sys
import time

import pytest
from imported_configs import CONFIGS

from cpt.cli import main
from cpt.errors import RecipeError
from cpt.importing.command import Tool, command, imported

EXAMPLE = CONFIGS / "axolotl" / "kto.yml"


def test_a_recipe_is_written_and_the_keys_are_listed(tmp_path, capsys):
    command(EXAMPLE, output=tmp_path / "new" / "r.yaml")
    shown = capsys.readouterr().out
    assert (
        "Carried over (" in shown
        and "Not carried over (1)" in shown
        and "12 keys" in shown
        and "Next: cpt check" in shown
    )
    assert "stage: kto" in (tmp_path / "new" / "r.yaml").read_text()


def test_a_file_is_not_written_over_unasked(tmp_path):
    output = tmp_path / "r.yaml"
    output.write_text("mine")
    with pytest.raises(RecipeError, match="--force"):
        command(EXAMPLE, output=output)
    assert output.read_text() == "mine"
    command(EXAMPLE, output=output, force=True)
    assert output.read_text() != "mine"


def test_no_torch_is_imported_and_a_mistake_ends_with_code_2(tmp_path):
    check = "assert not {'torch', 'transformers'} & set(sys.modules)"
    code = f"import sys\nfrom cpt.cli import main\ntry: main(sys.argv[1:])\nfinally: {check}"
    words = [sys.executable, "-c", code, "import", str(EXAMPLE), "--output", str(tmp_path / "r.yaml")]
    assert subprocess.run(words, capture_output=True, text=True, check=False).returncode == 0
    again = subprocess.run(words, capture_output=True, text=True, check=False)
    assert again.returncode == 2 and again.stderr.startswith("RecipeError:") and "Traceback" not in again.stderr


def test_it_takes_less_than_a_second_of_work(tmp_path):
    start = time.process_time()
    command(EXAMPLE, output=tmp_path / "r.yaml")
    assert time.process_time() - start < 1


def test_the_tool_may_be_said(tmp_path):
    path = tmp_path / "c.yml"
    both = "base_model: a/b\ndatasets: [{path: c/d, type: completion}]\nmodel_name_or_path: e/f\n"
    path.write_text(both + "dataset: g/h\ndataset_dir: ONLINE\nstage: pt\n")
    with pytest.raises(RecipeError, match="mixes keys of two tools"):
        imported(path)
    assert imported(path, Tool.AXOLOTL).recipe["model"]["path"] == "a/b"
    ledger = imported(path, Tool.LLAMAFACTORY)
    assert (
        ledger.recipe["model"]["path"] == "e/f"
        and {entry.key: entry.verdict for entry in ledger.entries}["base_model"] == "not"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "base_modle: a/b\nmicro_batch_size: 2\n",
            "`base_model` is missing, which axolotl needs.*Did you mean `base_modle`?",
        ),
        ("finetuning_type: lora\n", "`model_name_or_path` is missing, which llamafactory needs"),
        ("base_model: [a]\nmicro_batch_size: 1\n", "`base_model` is missing"),
    ],
)
def test_there_is_a_model_to_start_from(tmp_path, text, said):
    path = tmp_path / "c.yml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=said):
        imported(path)


def test_values_that_no_recipe_can_have_are_told(tmp_path):
    path = tmp_path / "c.yml"
    path.write_text("base_model: a/b\ndatasets: [{path: c/d, type: completion}]\nlearning_rate: -1\n")
    with pytest.raises(RecipeError, match=r"r.yaml:\d+: `optimizer.learning_rate`: must be more than 0"):
        command(path, output=tmp_path / "r.yaml")


def test_an_unknown_tool_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["import", str(EXAMPLE), "--from", "torchtune"])
    assert ended.value.code == 2 and "axolotl" in capsys.readouterr().err

from run_folders import write_run

from cpt.compare.comparison import compare
from cpt.compare.text import markdown, print_comparison


def test_the_terminal_shows_names_as_they_are(tmp_path, capsys):
    runs = [
        write_run(tmp_path / "a[red]b"),
        write_run(tmp_path / "other", lambda recipe, **others: recipe.update(seed=5)),
    ]
    (runs[1] / "inputs.json").unlink()
    print_comparison(compare(runs))
    shown = capsys.readouterr().out
    assert (
        "a[red]b" in shown
        and "Not compared:" in shown
        and shown.startswith("2 runs, beside a[red]b: 1 difference (recipe 1).")
    )
    assert next(line for line in shown.splitlines() if line.startswith("seed")).split() == ["seed", "1", "5"]


def test_markdown_has_a_table_for_each_topic_and_escapes_what_users_chose(tmp_path):
    runs = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", lambda recipe, **others: recipe.update(description="x | *y*")),
    ]
    page = markdown(compare(runs))
    assert "## Recipe\n\n|  | a | b |\n| --- | --- | --- |\n| description | '' | x \\| \\*y\\* |" in page
    assert "## Training loss" in page and "bit-equal" in page and "Traceback" not in page

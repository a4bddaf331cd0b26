from run_folders import write_run

from cpt.compare.comparison import compare
from cpt.compare.page import comparison_page, plots_of


def test_the_page_has_tables_curves_and_no_way_into_the_page_for_names(tmp_path):
    runs = [
        write_run(tmp_path / "a<b>"),
        write_run(tmp_path / "other", lambda recipe, **others: recipe.update(seed=5)),
    ]
    page = comparison_page(compare(runs))
    assert "a&lt;b&gt;" in page and "<b>" not in page and "What differs" in page and "seed" in page


def test_each_run_has_a_curve_in_each_plot_that_it_has_figures_for(tmp_path):
    runs = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", lambda inputs, **others: inputs["tokenizer"].update(xxh3="other")),
    ]
    plots = {plot.title: [curve.name for curve in plot.curves] for plot in plots_of(compare(runs))}
    assert plots == {"Training loss": ["a"], "Held-out text: domain": ["a", "b"], "Speed": ["a", "b"]}

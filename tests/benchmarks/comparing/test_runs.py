from benchmarks.comparing.runs import write_runs
from cpt.analysis.compare import compare


def test_the_runs_of_the_benchmark_are_whole_and_differ_as_planned(tmp_path):
    comparison = compare(write_runs(tmp_path, number=2, steps=50))
    assert [row.name for topic in comparison.differences for row in topic.rows] == ["seed", "optimizer.learning_rate"]
    assert comparison.not_compared == []

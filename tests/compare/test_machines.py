from run_folders import ENVIRONMENT, copied, write_lines, write_run

from cpt.compare.machines import code_topic, machine_topic, versions_topic
from cpt.compare.record import read_record


def records(tmp_path, *plants):
    folders = [
        write_run(tmp_path / f"run{number}", *([plant] if plant else [])) for number, plant in enumerate(plants)
    ]
    return [read_record(folder, folder.name) for folder in folders]


def rows(topic):
    return {row.name: row.values for row in topic.rows}


def test_versions_differ_where_both_are_known(tmp_path):
    def planted(environment, **others):
        environment["python"] = "3.12.1"
        environment["versions"] = {"torch": "2.13.0", "peft": "0.21", "trl": "1.0"}

    found = rows(versions_topic(records(tmp_path, None, planted)))
    assert found == {"python": ("3.11.7", "3.12.1"), "peft": ("not installed", "0.21")}


def test_a_later_start_on_another_version_is_told(tmp_path):
    first, second = records(tmp_path, None, None)
    later = copied(ENVIRONMENT)
    later["versions"]["torch"] = "2.14.0"
    write_lines(second.folder / "starts.jsonl", [later])
    second = read_record(second.folder, "second")
    assert rows(versions_topic([first, second])) == {"torch": ("2.13.0", "2.13.0, then 2.14.0")}


def test_commits_changes_and_source_files_are_compared(tmp_path):
    def changed(environment, **others):
        environment["git"] = {"commit": "0" * 40, "changes": " M cpt/train.py\n?? runs/\n", "diff": "+x"}
        environment["code"] = "fedcba9876543210"

    def also_changed(environment, **others):
        environment["git"] = {"commit": "0" * 40, "changes": " M cpt/train.py\n", "diff": "+y"}

    found = rows(code_topic(records(tmp_path, None, changed, also_changed)))
    assert found["commit"] == ("bad36a92eff5", "0" * 12, "0" * 12)
    none, one, other = found["uncommitted changes"]
    assert none == "none" and one.startswith("cpt/train.py (") and other.startswith("cpt/train.py (") and one != other
    assert found["source files of cpt"] == ("0123456789ab", "fedcba987654", "0123456789ab")


def test_what_an_older_record_does_not_tell_is_no_difference(tmp_path):
    def older(environment, **others):
        for key in ("hardware", "variables", "code"):
            del environment[key]

    runs = records(tmp_path, None, older)
    assert rows(machine_topic(runs)) == {} == rows(code_topic(runs))


def test_hardware_processes_and_variables_are_compared(tmp_path):
    def other(environment, **others):
        environment["processes"] = 8
        environment["hardware"] |= {"gpus": ["H100", "H100"]}
        environment["variables"] = {}

    found = rows(machine_topic(records(tmp_path, None, other)))
    assert found == {
        "processes": ("1", "8"),
        "gpus": ("none", "2 x H100"),
        "variable OMP_NUM_THREADS": ("2", "not set"),
    }


def test_a_run_started_outside_a_repository_differs_from_one_inside(tmp_path):
    found = rows(code_topic(records(tmp_path, None, lambda environment, **others: environment.update(git=None))))
    assert found == {"commit": ("bad36a92eff5", "no repository")}

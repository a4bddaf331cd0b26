from benchmarks.gpu.gates import all_gates, gates_of, told


def result(case, system, **figures):
    return {"case": case, "system": system, "tokens_per_second": 100.0, "losses": [6.0, 5.0], **figures}


def named(results, name):
    return next(one for one in gates_of(results) if one.name == name)


def test_a_gate_is_not_run_where_a_result_is_missing_or_failed():
    ours, theirs = result("B", "cpt", tokens_per_second=210.0), result("B", "trainer")
    name = "B: speed beside the default Trainer"
    assert named([ours, theirs], name).reached and named([ours, theirs], name).figure == 2.1
    assert named([ours], name).reached is None
    assert named([ours, {"case": "B", "system": "trainer", "failed": "out of memory"}], name).reached is None
    assert named([ours, theirs], "B: memory beside the default Trainer").reached is None, "no GPU's memory"


def test_losses_that_are_a_percent_apart_are_not_the_same():
    near, far = result("A", "bare", losses=[6.05, 5.0]), result("A", "bare", losses=[6.0, 5.06])
    assert named([result("A", "cpt"), near], "A: losses beside bare").reached
    assert named([result("A", "cpt"), far], "A: losses beside bare").reached is False


def test_packed_rows_are_judged_by_operations_and_not_by_tokens():
    results = [result("C", "cpt", mfu=0.6), result("D", "cpt", mfu=0.58, packing_efficiency=0.985)]
    assert named(results, "D: FLOP rate beside whole rows").reached
    assert named(results, "D: packing efficiency").reached is False


def test_every_gate_is_told():
    assert len(told(gates_of([])).splitlines()) == len(all_gates()) and told(gates_of([])).count("not run") == len(all_gates())

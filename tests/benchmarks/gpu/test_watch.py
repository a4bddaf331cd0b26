import pytest

from benchmarks.gpu.watch import Watch, idle_share, times_of


def test_the_gpu_is_idle_where_no_kernel_runs():
    assert idle_share([(0, 4), (1, 2), (3, 6), (8, 10)]) == pytest.approx(0.2)
    assert idle_share([]) == 0 and idle_share([(2, 5)]) == 0


def test_one_slow_step_moves_the_median_of_groups_little():
    times = times_of([1.0] * 19 + [100.0])
    assert times["step_seconds"] == 1.0 and times["p50"] == 1.0 and times["p95"] > 1.0


def test_steps_of_the_warm_up_are_not_timed(monkeypatch):
    import torch

    watch = Watch(on_gpu=False, warmup=2, timed=3)
    clock = iter([0.0, 0.0, 10.0, 11.0, 12.0, 13.0, 50.0])  # at the first step it is looked at twice
    monkeypatch.setattr("benchmarks.gpu.watch.time.perf_counter", lambda: next(clock))
    for step in range(1, 7):
        watch.losses += [torch.tensor(1.0), torch.tensor(0.5)]
        watch.end(step)
    found = watch.finish(micro_batches=2)
    assert found["step_seconds"] == 1.0 and found["losses"] == [1.5] * 6

"""Prompts come by the number of the step: the same for all processes, and where a run goes on."""

from types import SimpleNamespace

from cpt.stages.generating import PromptTrainer
from cpt.training.arguments import Generations


def prompts_from(step, rank=0):
    """What a process gets, micro-batch by micro-batch: 4 prompts a generation, which lasts for 2 micro-batches, one
    step."""
    workers = {"dataloader_num_workers": 0, "dataloader_persistent_workers": False, "dataloader_prefetch_factor": None}
    arguments = SimpleNamespace(world_size=2, process_index=rank, **workers)
    rows = [{"prompt": str(number)} for number in range(100)]
    facts = {
        "rows": rows,
        "rows_of_steps": SimpleNamespace(left_out=[]),
        "length": SimpleNamespace(steps=3),
        "first_step": step,
    }
    plan = Generations(prompts=4, micro_batches=2, accumulation=2)
    trainer = SimpleNamespace(args=arguments, generations=plan, **facts)
    return [[row["prompt"] for row in batch] for batch in PromptTrainer.get_train_dataloader(trainer)]


def test_each_micro_batch_has_the_prompts_of_its_generation_on_all_processes():
    straight = prompts_from(0)
    assert straight == prompts_from(0, rank=1)
    assert (
        straight[0] == straight[1] == ["0", "1", "2", "3"]
        and straight[2] == ["4", "5", "6", "7"]
        and len(straight) == 6
    )


def test_a_run_that_goes_on_gets_what_it_would_have_got():
    assert prompts_from(2) == prompts_from(0)[4:]

"""Hand each micro-batch the prompts of its generation, from the step on that a run stands at."""

from cpt.data.loader import CPTDataLoader
from cpt.stages.sampling.generations import Generations, PromptRows, only_item
from cpt.stages.trainer import CPTTrainer


def prompt_loader(trainer: CPTTrainer, plan: Generations) -> CPTDataLoader:
    """For each micro-batch of this process the prompts of its generation, from the first step on that is still to be
    trained."""
    arguments = trainer.args
    workers, world = arguments.dataloader_num_workers, arguments.world_size
    items_of_step = plan.accumulation * world
    return CPTDataLoader(
        PromptRows(trainer.rows, plan, world, trainer.rows_of_steps.left_out),  # type: ignore[arg-type]  # lists, for `only_item`
        micro_batch=1,
        rows_in_all=trainer.length.steps * items_of_step,
        rank=arguments.process_index,
        world_size=world,
        first_row=trainer.first_step * items_of_step,
        num_workers=workers,
        persistent_workers=arguments.dataloader_persistent_workers,
        prefetch_factor=arguments.dataloader_prefetch_factor if workers else None,
        collate_fn=only_item,
    )

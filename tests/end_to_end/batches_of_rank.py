"""What each rank reads, as a program for torchrun: RECIPE OUT FIRST_STEP STEPS [--workers N]; writes OUT-<rank>.pt."""

import argparse
import os

import torch

from cpt.data.rows.build import build_data
from cpt.data.rows.loader import CPTDataLoader
from cpt.distributed import join_processes, leave_processes
from cpt.recipe.load import load_recipe
from cpt.tokenizer.load import load_tokenizer

ROWS_PER_STEP = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("out")
    parser.add_argument("first_step", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    join_processes(recipe.training)
    data = build_data(
        recipe.data, load_tokenizer(recipe.tokenizer, recipe.model), seed=recipe.seed, evaluation=recipe.evaluation
    )
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    first = arguments.first_step * ROWS_PER_STEP
    loader = CPTDataLoader(
        data.rows,
        micro_batch=1,
        rows_in_all=first + arguments.steps * ROWS_PER_STEP,
        rank=rank,
        world_size=world_size,
        first_row=first,
        num_workers=arguments.workers,
    )
    sources = [
        data.rows.turn(first + number * world_size + rank)[0]
        for number in range(arguments.steps * ROWS_PER_STEP // world_size)
    ]
    read = [{**batch, "source": source} for batch, source in zip(loader, sources, strict=True)]
    torch.save(read, f"{arguments.out}-{rank}.pt")
    leave_processes()


if __name__ == "__main__":
    main()

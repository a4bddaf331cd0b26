"""What TRL's experimental preference trainers without a reference model (ORPO, CPO) need to train on our rows."""

from collections.abc import Callable
from typing import Any

from datasets import Dataset as ShownRows

from cpt.data.held_out import HeldOutSet
from cpt.data.rows.rows import IGNORED
from cpt.stages.examples import ExampleTrainer

SHOWN = {"prompt": "a", "chosen": "b", "rejected": "c"}


class UnreferencedTrainer(ExampleTrainer):
    """To be put in front of TRL's trainer."""

    def shown_at_first(self, rows: Any) -> ShownRows:
        """They tokenise what they are built with by themselves, and it is never trained on."""
        return ShownRows.from_list([SHOWN])

    def collate_examples(self) -> Callable[[list[Any]], Any] | None:
        """TRL's collator, of rows with its names."""
        collate, most = self.data_collator, self.recipe.data.sequence_length

        def renamed(examples: list[dict[str, Any]]) -> Any:
            return collate(
                [
                    {**answer("chosen", one, most), **answer("rejected", one, most), **prompt(one, most)}
                    for one in examples
                ]
            )

        return renamed

    @property
    def metrics_of_evaluation(self) -> dict[str, list[float]]:
        """They keep theirs by another name, and those of an evaluation among those of the training."""
        metrics: dict[str, dict[str, list[float]]] = vars(self)["_stored_metrics"]
        return metrics["train"]

    def measure(self, held_out: HeldOutSet) -> dict[str, float]:
        """The figures of one set; what was measured in training since the last log is put back after it."""
        of_training = dict(self.metrics_of_evaluation)
        try:
            return super().measure(held_out)
        finally:
            self.metrics_of_evaluation.update(of_training)


def prompt(example: dict[str, Any], most: int) -> dict[str, list[int]]:
    """The prompt by itself."""
    ids = example["prompt_ids"][:most]
    return {"prompt_input_ids": ids, "prompt_attention_mask": [1] * len(ids)}


def answer(which: str, example: dict[str, Any], most: int) -> dict[str, list[int]]:
    """Prompt and answer, of which the answer has labels."""
    before, after = example["prompt_ids"], example[f"{which}_ids"]
    return {
        f"{which}_input_ids": [*before, *after][:most],
        f"{which}_attention_mask": ([1] * (len(before) + len(after)))[:most],
        f"{which}_labels": [*([IGNORED] * len(before)), *after][:most],
    }

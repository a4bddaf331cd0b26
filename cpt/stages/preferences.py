"""What TRL's trainers of preferences need to train on our rows: whole dialogues, judged answers, no reference."""

from collections.abc import Callable
from typing import Any

from datasets import Dataset as ShownRows

from cpt.data.held_out import HeldOutSet
from cpt.data.packing import IGNORED
from cpt.stages.examples import ExampleTrainer

Collate = Callable[[list[Any]], Any]
SHOWN = {"prompt": "a", "chosen": "b", "rejected": "c"}


class WholeDialogues(ExampleTrainer):
    """For reward models."""

    def collate_examples(self) -> Collate:
        collate, most = self.data_collator, self.recipe.data.sequence_length
        sides = ("chosen_ids", "rejected_ids")
        return lambda rows: collate([{side: (row["prompt_ids"] + row[side])[:most] for side in sides} for row in rows])


class JudgedAnswers(ExampleTrainer):
    """For KTO."""

    calculate_KL: bool  # noqa: N815 - TRL's name

    def collate_examples(self) -> Collate:
        """TRL's collator; the KL term is taken of prompts with the answer of the row before, which TRL puts into the
        rows ahead of time."""
        collate: Collate = self.data_collator
        if not self.calculate_KL:
            return collate

        def with_others(examples: list[dict[str, Any]]) -> Any:
            answers = [example["completion_ids"] for example in examples]
            mismatched = [answers[-1], *answers[:-1]]
            pairs = zip(examples, mismatched, strict=True)
            return collate([{**one, "KL_completion_ids": other} for one, other in pairs])

        return with_others


class WithoutReference(ExampleTrainer):
    """For TRL's experimental ORPO and CPO, which tokenize by themselves and have names of their own."""

    def shown_at_first(self, rows: Any) -> ShownRows:
        """A row of texts, which is never trained on."""
        return ShownRows.from_list([SHOWN])

    def collate_examples(self) -> Collate:
        collate, most = self.data_collator, self.recipe.data.sequence_length
        return lambda rows: collate([renamed(row, most) for row in rows])

    @property
    def metrics_of_evaluation(self) -> dict[str, list[float]]:
        """They keep those of an evaluation among those of the training."""
        metrics: dict[str, dict[str, list[float]]] = vars(self)["_stored_metrics"]
        return metrics["train"]

    def measure(self, held_out: HeldOutSet) -> dict[str, float]:
        """The figures of one set; what was measured in training since the last log is put back after it."""
        of_training = dict(self.metrics_of_evaluation)
        try:
            return super().measure(held_out)
        finally:
            self.metrics_of_evaluation.update(of_training)


def renamed(row: dict[str, Any], most: int) -> dict[str, list[int]]:
    """Prompt, and prompt with each answer, of which the answer has labels; cut at `most` tokens."""
    prompt = row["prompt_ids"]
    found = {"prompt_input_ids": prompt[:most], "prompt_attention_mask": [1] * len(prompt[:most])}
    for side in ("chosen", "rejected"):
        ids = [*prompt, *row[f"{side}_ids"]][:most]
        labels = [*([IGNORED] * len(prompt)), *row[f"{side}_ids"]][:most]
        found |= {f"{side}_input_ids": ids, f"{side}_attention_mask": [1] * len(ids), f"{side}_labels": labels}
    return found

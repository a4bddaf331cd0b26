"""What each stage's tiny recipe has to reach, read from the run's metrics or asked of its exported model."""

import json
from pathlib import Path

from tiny_tasks import answers
from transformers import AutoModelForCausalLM, AutoTokenizer


def figures(run: Path, name: str) -> list[float]:
    """All values of a figure, in order."""
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in logged if name in line]


def greedy_answers(folder: Path, questions: list[str]) -> list[str]:
    """What the exported model answers."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    said = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = model.generate(**prompt, max_new_tokens=8, do_sample=False)
        said.append(
            tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    return said


def answers_are_right(run: Path) -> None:
    """Each animal's sound, greedily."""
    known = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in answers()}
    assert greedy_answers(run / "final", list(known)) == list(known.values())


def margin_grows(run: Path) -> None:
    """The reference begins as the model itself, so the margin begins near 0."""
    margins = figures(run, "rewards/margins")
    assert (
        margins[0] < 0.5 * margins[-1]
        and margins[-1] > 1
        and figures(run, "rewards/accuracies")[-1] > 0.95
    )


def pairs_are_told_apart(run: Path) -> None:
    """Pairs that it was not trained on."""
    assert figures(run, "eval_preferences_accuracy")[-1] > 0.95


def reward_rises(run: Path) -> None:
    """From at most 0.5 to above 0.9."""
    rewards = figures(run, "reward")
    assert rewards[0] <= 0.5 and rewards[-1] > 0.9


LEARNED = {
    "sft": answers_are_right,
    "dpo": margin_grows,
    "reward": pairs_are_told_apart,
    "grpo": reward_rises,
    "ppo": reward_rises,
    "spo": reward_rises,
}
"""Stage -> what asserts that it learned."""

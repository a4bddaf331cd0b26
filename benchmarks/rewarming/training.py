"""Run each arm through the demo's recipes: `cpt train` with overrides."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rewarming.corpus import GENERAL, Shift, Text, tokenizer_texts
from cpt.evaluation.scoring import read_course
from cpt.recipe.load import load_recipe
from cpt.tokenizer.train_bpe import train_bpe
from cpt.train import train

RECIPES = Path(__file__).parents[2] / "recipes"
BASE, NO_REWARMING, REWARMING, REPLAY, JOINT = (
    "base",
    "no re-warming",
    "re-warming",
    "re-warming + replay",
    "joint from scratch",
)
ARMS = (NO_REWARMING, REWARMING, REPLAY, JOINT)
FLOOR = 0.1  # the last learning rate as a share of the peak: of the base, and of every arm whose rate falls
WARMUP_SHARE = 0.05


@dataclass(frozen=True)
class Scale:
    """How much is trained, the same for every arm."""

    base_tokens: int = 600_000
    tokens: int = 150_000
    batch_tokens: int = 512  # of one optimizer step
    learning_rate: float = 4e-3  # the peak: of the base, of re-warming and of joint training
    evaluated_documents: int = 40  # of each held-out set at most


SCALE = Scale()


@dataclass(frozen=True)
class Result:
    """One run: bits per byte of each held-out set after its last step."""

    arm: str
    shift: str | None
    """None: the base, that all shifts start from."""
    seed: int
    tokens: int
    bits_per_byte: dict[str, float]


@dataclass(frozen=True)
class Experiment:
    """What the runs have in common."""

    texts: Mapping[str, Text]
    tokenizer: Path
    folder: Path

    def make_tokenizer(self) -> None:
        """Train it on the texts, unless it is there."""
        if self.tokenizer.exists():
            return
        recipe = load_recipe(
            RECIPES / "demo" / "pretrain.yaml", [f"tokenizer.path={self.tokenizer}"]
        )
        vocabulary = int((recipe.model.config or {})["vocab_size"])
        train_bpe(tokenizer_texts(self.texts), vocabulary, self.tokenizer)

    def run_base(self, seed: int) -> Result:
        """On general text; the seed decides the first weights and the order of the data."""
        return self.run(BASE, None, seed, SCALE.base_tokens, {GENERAL: 1.0})

    def run_arm(self, arm: str, shift: Shift, seed: int) -> Result:
        """One arm, from the base of the same seed unless it is joint training."""
        base_tokens, tokens = SCALE.base_tokens, SCALE.tokens
        if arm == JOINT:
            together = base_tokens + tokens
            return self.run(
                arm,
                shift,
                seed,
                together,
                {GENERAL: base_tokens / together, shift.name: tokens / together},
            )
        replay = {GENERAL: shift.replay} if arm == REPLAY else {}
        return self.run(arm, shift, seed, tokens, {shift.name: 1 - sum(replay.values()), **replay})

    def run(
        self, arm: str, shift: Shift | None, seed: int, tokens: int, shares: Mapping[str, float]
    ) -> Result:
        """Train it, unless it is finished already, and read what came of it."""
        name = f"{f'{shift.name}-' if shift else ''}{arm.replace(' + ', '-').replace(' ', '_')}-seed{seed}"
        sources = [
            {"path": str(self.texts[kind].train), "name": kind, "weight": share}
            for kind, share in shares.items()
        ]
        sets = [
            {"path": str(text.held_out), "name": kind, "max_documents": SCALE.evaluated_documents}
            for kind, text in self.texts.items()
        ]
        if arm in (BASE, JOINT):
            recipe, start = RECIPES / "demo" / "pretrain.yaml", [f"tokenizer.path={self.tokenizer}"]
        else:
            recipe = RECIPES / "demo.yaml"
            start = [
                f"model.path={self.folder / f'{BASE}-seed{seed}' / 'final'}",
                "evaluation.prompts=[]",
            ]
        overrides = [
            f"name={name}",
            f"seed={seed}",
            f"output_dir={self.folder}",
            f"budget.tokens={tokens}",
            f"budget.global_batch_tokens={SCALE.batch_tokens}",
            "training.per_device_train_batch_size=2",
            f"data.sources={json.dumps(sources)}",
            f"evaluation.perplexity={json.dumps(sets)}",
        ]
        loaded = load_recipe(
            recipe, [*overrides, *schedule(arm, tokens, SCALE.learning_rate), *start]
        )
        bits = read_course(train(loaded).parent / "metrics.jsonl")[-1].bits_per_byte
        return Result(arm, shift.name if shift else None, seed, tokens, bits)


def schedule(arm: str, tokens: int, peak: float) -> list[str]:
    """Overrides of the learning rate: without re-warming it stays where the base's ended."""
    if arm == NO_REWARMING:
        return [f"optimizer.learning_rate={peak * FLOOR!r}", 'schedule={"name": "constant"}']
    start = (
        {"name": "rewarm_cosine", "start": FLOOR}
        if arm in (REWARMING, REPLAY)
        else {"name": "cosine"}
    )
    return [
        f"optimizer.learning_rate={peak!r}",
        f"schedule={json.dumps({**start, 'warmup_tokens': round(WARMUP_SHARE * tokens), 'floor': FLOOR})}",
    ]

"""One recipe, split over processes in every way: the same losses, and resumes on fewer processes."""

import json
import subprocess

import pytest
from launching import BIN, ROOT, environment_of_a_run, losses, zero_profile
from resuming import differences
from tiny import TINY_LLAMA, write_recipe
from tiny_tasks import TINY

from cpt.checkpoints.manifest import defects, read_manifest
from cpt.recipe.load import load_recipe
from cpt.runs.events import read_events

GPT2 = {
    "model_type": "cpt-gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 384,
    "unpadded_vocab_size": 320,
}
MODELS = {"llama": {**TINY_LLAMA, "tie_word_embeddings": True}, "gpt2": GPT2}
WAYS = ("plain", "fsdp", "zero2", "zero3")
TOKENS_OF_STEP = {"sft": 1024, "dpo": 512, "reward": 512, "cpo": 512, "orpo": 512}
STEPS = 8
TOLERANCE = 1e-6
"""Relative, of fp32 losses: processes add gradients up in another order."""
OF_STAGES = 2e-5
"""The same where steps are larger and losses steeper."""


class Runs:
    """A folder of runs that are trained one after the other in one launch, by one process or by two."""

    def __init__(self, folder, corpus, tokenizer):
        self.folder, self.corpus, self.tokenizer = folder, corpus, tokenizer
        self.ways = {
            "plain": {},
            "fsdp": {"fsdp": True},
            "zero2": {"deepspeed": zero_profile(folder, 2)},
            "zero3": {"deepspeed": zero_profile(folder, 3)},
        }

    def planned(self, name, way, *, model="llama", begins_as=None, step=4, every=2, **training):
        """What `several_runs.py` is told of one run."""
        sections = {
            "name": name,
            "stage": "pretrain",
            "output_dir": str(self.folder / "runs"),
            "model": {"from_scratch": True, "config": MODELS[model]},
            "tokenizer": {"path": str(self.tokenizer)},
            "data": {"sequence_length": 64, "sources": [{"path": str(self.corpus / "domain.jsonl")}]},
            "budget": {"tokens": STEPS * 256, "global_batch_tokens": 256},
            "optimizer": {"learning_rate": 3e-3},
            "checkpoints": {"every_steps": every, "keep": None},
            "training": {"per_device_train_batch_size": 2, "logging_steps": 1, **self.ways[way], **training},
        }
        recipe = write_recipe(sections, self.folder / f"{name}.yaml")
        return {"recipe": str(recipe), "begins_as": begins_as and str(self.of(begins_as)), "step": step}

    def planned_stage(self, name, stage, way, *, processes):
        """The stage's tiny recipe for a few steps, with the same rows in each however many processes there are."""
        given = load_recipe(TINY / f"{stage}.yaml").training
        rows = {key: given[key] // processes for key in ("gradient_accumulation_steps",) if key in given}
        rows = rows or {"per_device_train_batch_size": given["per_device_train_batch_size"] // processes}
        sections = {
            "base": str(TINY / f"{stage}.yaml"),
            "name": name,
            "output_dir": str(self.folder / "runs"),
            "budget": {"tokens": 4 * TOKENS_OF_STEP[stage], "epochs": None},
            "training": {"logging_steps": 1, **rows, **self.ways[way]},
        }
        return {"recipe": str(write_recipe(sections, self.folder / f"{name}.yaml"))}

    def train(self, processes, *planned):
        """All of them, in one launch."""
        plan = self.folder / f"plan-of-{processes}.json"
        plan.write_text(json.dumps(planned))
        words = [
            str(BIN / "torchrun"),
            "--standalone",
            f"--nproc_per_node={processes}",
            "tests/end_to_end/several_runs.py",
            str(plan),
        ]
        environment = {**environment_of_a_run(), "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]

    def of(self, name):
        """The run's folder."""
        return self.folder / "runs" / name


@pytest.fixture(scope="module")
def runs(corpus, tokenizer_folder, tmp_path_factory):
    """All that the tests look at: two launches."""
    made = Runs(tmp_path_factory.mktemp("splitting"), corpus, tokenizer_folder)
    plan = made.planned
    made.train(
        2,
        *(plan(f"llama-{way}", way, every=2 if way == "fsdp" else STEPS) for way in WAYS),
        plan("again", "fsdp", begins_as="llama-fsdp"),
    )
    made.train(
        1,
        plan("llama-alone", "plain", every=STEPS),
        plan("fewer", "fsdp", begins_as="llama-fsdp"),
    )
    return made


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_recipe_has_the_same_losses_however_it_is_split(runs):
    same_however_it_is_split(runs, "llama")


def same_however_it_is_split(runs, model):
    """On one process and in all ways."""
    alone = losses(runs.of(f"{model}-alone"))
    assert len(alone) == STEPS and alone[-1] < alone[0]
    for way in WAYS:
        assert losses(runs.of(f"{model}-{way}")) == pytest.approx(alone, rel=TOLERANCE), way


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_of_our_families_has_the_same_losses_however_it_is_split(corpus, tokenizer_folder, tmp_path):
    made = Runs(tmp_path, corpus, tokenizer_folder)
    made.train(2, *(made.planned(f"gpt2-{way}", way, model="gpt2", every=STEPS) for way in WAYS))
    made.train(1, made.planned("gpt2-alone", "plain", model="gpt2", every=STEPS))
    same_however_it_is_split(made, "gpt2")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fsdp_resumes_bit_for_bit(runs):
    assert losses(runs.of("again")) == losses(runs.of("llama-fsdp"))
    last = runs.of("again") / f"checkpoint-{STEPS}"
    assert differences(runs.of("llama-fsdp") / last.name, last) == [] and defects(last) == []
    assert read_manifest(last).exactness.startswith(("bit-exact", "rounding: GPU"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fsdp_resumes_on_one_process(runs):
    assert losses(runs.of("fewer")) == pytest.approx(losses(runs.of("llama-fsdp")), rel=TOLERANCE)
    assert [event["kind"] for event in read_events(runs.of("fewer"))] == ["elastic"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_stages_with_losses_of_their_own_have_the_same_under_fsdp(corpus, tokenizer_folder, tmp_path):
    made = Runs(tmp_path, corpus, tokenizer_folder)
    made.train(1, *(made.planned_stage(f"{stage}-alone", stage, "plain", processes=1) for stage in TOKENS_OF_STEP))
    made.train(2, *(made.planned_stage(f"{stage}-fsdp", stage, "fsdp", processes=2) for stage in TOKENS_OF_STEP))
    for stage in TOKENS_OF_STEP:
        alone = losses(made.of(f"{stage}-alone"))
        assert len(alone) >= 4 and losses(made.of(f"{stage}-fsdp")) == pytest.approx(alone, rel=OF_STAGES), stage

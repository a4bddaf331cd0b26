"""One recipe, split over processes in every way: the same losses; and a checkpoint of one way goes on in another."""

import json
import subprocess
from functools import partial

import pytest
from launching import BIN, ROOT, environment_of_a_run, losses, zero_profile
from resuming import differences
from tiny import TINY_LLAMA, write_recipe
from tiny_tasks import TINY

from cpt.checkpoints.manifest import read_manifest
from cpt.checkpoints.verify import defects
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
OTHERS = ("zero1", "zero2-offload", "zero3-offload")
TOKENS_OF_STEP = {"sft": 1024, "dpo": 512, "reward": 512, "cpo": 512, "orpo": 512}
STEPS = 8
TOLERANCE = 1e-6
"""Relative, of fp32 losses: processes add gradients up in another order."""
IN_BF16 = 3e-4
"""The same where layers compute with 8 bits of each number."""
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
            "zero1": {"deepspeed": zero_profile(folder, 1)},
            "zero2-offload": {"deepspeed": zero_profile(folder, 2, offload=True)},
            "zero3-offload": {"deepspeed": zero_profile(folder, 3, offload=True)},
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
        plan("to-zero2", "zero2", begins_as="llama-fsdp", step=2),
        plan("to-zero3", "zero3", begins_as="to-zero2", step=4),
        plan("to-fsdp", "fsdp", begins_as="to-zero3", step=6),
    )
    made.train(
        1,
        plan("llama-alone", "plain", every=STEPS),
        plan("to-one", "plain", begins_as="to-zero3", step=6),
        plan("fsdp-to-one", "plain", begins_as="llama-fsdp"),
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
def test_so_has_a_family_of_our_own(corpus, tokenizer_folder, tmp_path):
    made = Runs(tmp_path, corpus, tokenizer_folder)
    made.train(2, *(made.planned(f"gpt2-{way}", way, model="gpt2", every=STEPS) for way in WAYS))
    made.train(1, made.planned("gpt2-alone", "plain", model="gpt2", every=STEPS))
    same_however_it_is_split(made, "gpt2")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fsdp_goes_on_from_its_own_checkpoint_bit_for_bit(runs):
    assert losses(runs.of("again")) == losses(runs.of("llama-fsdp"))
    last = runs.of("again") / f"checkpoint-{STEPS}"
    assert differences(runs.of("llama-fsdp") / last.name, last) == [] and defects(last) == []
    assert read_manifest(last).exactness.startswith(("bit-exact", "rounding: GPU"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_checkpoint_goes_from_way_to_way_without_a_trace_in_the_losses(runs):
    """FSDP2 -> ZeRO-2 -> ZeRO-3 -> FSDP2 or one process; FSDP2 -> one process, with FSDP2 and without."""
    straight = losses(runs.of("llama-fsdp"))
    for name in ("to-zero2", "to-zero3", "to-fsdp", "to-one", "fsdp-to-one", "fewer"):
        assert losses(runs.of(name)) == pytest.approx(straight, rel=TOLERANCE), name
    assert [event["kind"] for event in read_events(runs.of("to-one"))] == ["converted"] * 3
    assert [event["kind"] for event in read_events(runs.of("fewer"))] == ["elastic"]
    said = read_manifest(runs.of("to-one") / f"checkpoint-{STEPS}").exactness
    assert said.startswith("converted: from step 2 with DeepSpeed's ZeRO-2 instead of FSDP2")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_way_goes_on_in_every_other(corpus, tokenizer_folder, tmp_path):
    made, ways = Runs(tmp_path, corpus, tokenizer_folder), (*WAYS, *OTHERS)
    plan, pairs = partial(made.planned, every=4), [(one, other) for one in ways for other in ways if one != other]
    made.train(
        2,
        *(plan(way, way) for way in ways),
        *(plan(f"{one}-to-{other}", other, begins_as=one) for one, other in pairs),
    )
    made.train(1, *(plan(f"{way}-alone", "plain", begins_as=way) for way in ways))
    straight = losses(made.of("plain"))
    for name in (*ways, *(f"{one}-to-{other}" for one, other in pairs), *(f"{way}-alone" for way in ways)):
        assert losses(made.of(name)) == pytest.approx(straight, rel=TOLERANCE), name


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_bf16_goes_from_way_to_way_too(corpus, tokenizer_folder, tmp_path):
    made = Runs(tmp_path, corpus, tokenizer_folder)
    plan, pairs = (
        partial(made.planned, every=4, bf16=True),
        [(one, other) for one in WAYS for other in WAYS if one != other],
    )
    made.train(
        2,
        *(plan(way, way) for way in WAYS),
        *(plan(f"{one}-to-{other}", other, begins_as=one) for one, other in pairs),
    )
    for one, other in pairs:
        assert losses(made.of(f"{one}-to-{other}")) == pytest.approx(losses(made.of(other)), rel=IN_BF16), (one, other)


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

"""One recipe on one process and on two, split in every way: the same losses, and resumes on fewer processes."""

import json
from pathlib import Path

import pytest
from launching import losses, run_program, zero_profile
from resuming import differences
from safetensors.torch import load_file
from tiny import TINY_LLAMA, write_recipe
from tiny_tasks import TINY
from tiny_teachers import save_teacher, texts_of

from cpt.checkpoints.manifest import defects, read_manifest
from cpt.checkpoints.model_folder import load_data
from cpt.recipe.load import load_recipe
from cpt.runs.events import read_events

pytestmark = pytest.mark.timeout(1800)
PROGRAM = Path(__file__).with_name("several_runs.py")
LLAMA = {"from_scratch": True, "config": {**TINY_LLAMA, "tie_word_embeddings": True}}
WAYS = ("plain", "fsdp", "zero2", "zero3")
ADAPTED = ("fsdp", "zero2", "zero3")
TRAINED = ("model.layers.1.", "model.norm.", "lm_head.")
TOKENS_OF_STEP = {"sft": 1024, "dpo": 512, "reward": 512, "cpo": 512, "orpo": 512}
STEPS = 8
CHANGES = ["data.sources.0.weight=0.2", "optimizer.learning_rate=1e-3", f"budget.tokens={12 * 256}"]


class Runs:
    """A folder of runs that are trained one after the other in one launch, by one process or by two."""

    def __init__(self, folder, corpus, tokenizer):
        self.folder, self.corpus, self.tokenizer = folder, corpus, tokenizer
        self.ways = {"plain": {}, "fsdp": {"fsdp": True}}
        self.ways |= {
            f"zero{stage}": {"deepspeed": zero_profile(folder, stage)} for stage in (2, 3)
        }
        self.ways["offload"] = {"deepspeed": zero_profile(folder, 2, offload=True)}

    def planned(
        self,
        name,
        way="plain",
        *,
        model=LLAMA,
        stage="pretrain",
        begins_as=None,
        changes=(),
        every=STEPS,
        in_background=False,
        replay_kl=None,
        safety=None,
        **training,
    ):
        """What `several_runs.py` expects for one run."""
        sources = [
            {"path": str(self.corpus / f"{source}.jsonl"), "weight": 1}
            for source in ("domain", "general")
        ]
        if replay_kl is not None:  # micro-batches with and without rows of this source
            sources[1] |= {"weight": 0.4, "replay_kl": replay_kl}
        sections = {
            "name": name,
            "stage": stage,
            "output_dir": str(self.folder / "runs"),
            "model": model,
            "tokenizer": {"path": str(self.tokenizer)},
            "data": {"sequence_length": 64, "sources": sources},
            "budget": {"tokens": STEPS * 256, "global_batch_tokens": 256},
            "optimizer": {"learning_rate": 3e-3},
            "checkpoints": {"every_steps": every, "keep": None, "in_background": in_background},
            "evaluation": training.pop("evaluation", {}),
            "safety": safety or {},
            "training": {
                "per_device_train_batch_size": 2,
                "logging_steps": 1,
                **self.ways[way],
                **training,
            },
        }
        recipe = write_recipe(sections, self.folder / f"{name}.yaml")
        begins = begins_as and str(self.of(begins_as))
        return {"recipe": str(recipe), "begins_as": begins, "step": 4, "changes": changes}

    def planned_stage(self, name, stage, way, *, processes, begins_as=None):
        """The stage's tiny recipe for a few steps, with the same rows in each however many processes there are."""
        given = load_recipe(TINY / f"{stage}.yaml").training
        rows = {
            key: given[key] // processes for key in ("gradient_accumulation_steps",) if key in given
        }
        rows = rows or {
            "per_device_train_batch_size": given["per_device_train_batch_size"] // processes
        }
        sections = {
            "base": str(TINY / f"{stage}.yaml"),
            "name": name,
            "output_dir": str(self.folder / "runs"),
            "budget": {"tokens": 4 * TOKENS_OF_STEP[stage], "epochs": None},
            "checkpoints": {"every_steps": 2, "keep": None},
            "training": {"logging_steps": 1, **rows, **self.ways[way]},
        }
        begins = begins_as and str(self.of(begins_as))
        return {
            "recipe": str(write_recipe(sections, self.folder / f"{name}.yaml")),
            "begins_as": begins,
            "step": 2,
        }

    def train(self, processes, *planned):
        """All of them, in one launch."""
        plan = self.folder / f"plan-of-{processes}.json"
        plan.write_text(json.dumps(planned))
        run_program(PROGRAM, plan, processes=processes)

    def of(self, name):
        """The run's folder."""
        return self.folder / "runs" / name

    def losses(self, name, metric="loss"):
        """That metric of each step."""
        lines = [
            json.loads(line) for line in (self.of(name) / "metrics.jsonl").read_text().splitlines()
        ]
        is_evaluation = metric.startswith("eval_")
        return [
            line[metric] for line in lines if metric in line and (is_evaluation or "loss" in line)
        ]


@pytest.fixture(scope="module")
def runs(corpus, tokenizer_folder, tmp_path_factory):
    """All that the slow tests read: two launches."""
    made = Runs(tmp_path_factory.mktemp("splitting"), corpus, tokenizer_folder)
    plan = made.planned
    teacher = save_teacher(made.folder / "teacher", tokenizer_folder, texts_of(corpus))
    distilled = {"stage": "distill_text", "teacher_model_name_or_path": str(teacher)}
    fused = {"model": {**LLAMA, "fused_loss": True}, "gradient_checkpointing": True}
    capped = {
        **LLAMA["config"],
        "model_type": "gemma2",
        "head_dim": 8,
        "final_logit_softcapping": 5.0,
    }
    capped = {"from_scratch": True, "config": capped}
    fused |= {"safety": {"first_batch_proof": True}}
    bamba = {**TINY_LLAMA, "model_type": "bamba", "mamba_n_heads": 8, "mamba_d_head": 8}
    bamba |= {"mamba_d_state": 8, "attn_layer_indices": [1], "z_loss_coefficient": 0.1}
    penalized = {
        "model": {"from_scratch": True, "config": bamba},
        "label_smoothing_factor": 0.1,
    }
    halves = {
        "model": {**LLAMA, "dtype": "bfloat16"},
        "bf16": True,
        "per_device_train_batch_size": 1,
    }
    adapted = {"stage": "cpt", "model": {"path": str(teacher), "lora": {"r": 4}}}
    rounded = {
        "model": {"from_scratch": True, "config": {**TINY_LLAMA, "attention_dropout": 0.1}},
        "bf16": True,
    }
    upper = {
        "model": {
            "from_scratch": True,
            "config": TINY_LLAMA,
            "train_only": ["layers.1", "model.norm", "lm_head"],
        }
    }
    near = {"stage": "cpt", "model": {"path": str(teacher)}, "replay_kl": 3.0}
    near_adapted = {**near, "model": adapted["model"]}
    evaluation = {
        "perplexity": [{"path": str(corpus / "held_out.jsonl")}],
        "prompts": ["the model", "x"],
    }
    rule = {"set": "held_out", "patience": 2, "margin": 9.0}  # more than any improvement
    stop = {**evaluation, "every_steps": 2, "stop": rule}
    made.train(
        2,
        *(plan(f"stops-{way}", way, evaluation=stop) for way in WAYS),
        *(plan(way, way, every=2 if way == "fsdp" else 4) for way in WAYS),
        *(plan(f"changed-{way}", way, begins_as=way, changes=CHANGES) for way in WAYS),
        *(plan(f"{way}-again", way, begins_as=way) for way in WAYS),
        *(plan(f"adapted-{way}", way, every=4, **adapted) for way in ADAPTED),
        *(
            plan(f"adapted-{way}-again", way, begins_as=f"adapted-{way}", **adapted)
            for way in ADAPTED
        ),
        *(plan(f"behind-{way}", way, every=4, in_background=True) for way in WAYS),
        plan("rounded", "offload", every=4, **rounded),
        plan("rounded-again", "offload", begins_as="rounded", **rounded),
        *(plan(f"upper-{way}", way, every=4, **upper) for way in ADAPTED),
        plan("upper-zero3-again", "zero3", begins_as="upper-zero3", **upper),
        plan("fused", **fused),
        *(plan(f"fused-{way}", way, **fused) for way in ADAPTED),
        plan("capped", "fsdp", model={**capped, "fused_loss": True}, evaluation=evaluation),
        *(plan(f"penalized-{way}", way, **penalized) for way in WAYS),
        plan("halves", **halves),
        plan("varlen-zero3", "zero3", model={**LLAMA, "attention": "varlen"}),
        plan("evaluated-zero3", "zero3", evaluation=evaluation),
        plan("distilled-zero3", "zero3", **distilled),
        *(plan(f"near-{way}", way, **near) for way in WAYS),
        *(plan(f"near-adapted-{way}", way, **near_adapted) for way in WAYS),
        made.planned_stage("dpo-zero2", "dpo", "zero2", processes=2),
    )
    made.train(
        1,
        plan("alone", every=4),
        plan("changed-alone", begins_as="alone", changes=CHANGES),
        plan("changed-fewer", begins_as="plain", changes=CHANGES),
        plan("upper", every=4, **upper),
        plan("upper-again", begins_as="upper", **upper),
        plan("capped-alone", model=capped, evaluation=evaluation),
        plan("penalized-alone", **penalized),
        plan("halves-alone", **halves),
        plan("adapted-alone", **adapted),
        plan("evaluated-alone", evaluation=evaluation),
        plan("alone-at-once", per_device_train_batch_size=4),
        *(plan(f"fewer-{way}", way, begins_as=way) for way in WAYS),
        made.planned_stage("dpo", "dpo", "plain", processes=1),
        made.planned_stage("dpo-again", "dpo", "plain", processes=1, begins_as="dpo"),
        plan("distilled-alone", **distilled),
        plan("near-alone", **near),
        plan("near-adapted-alone", **near_adapted),
    )
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [*WAYS, "fused", "fused-fsdp", "fused-zero2", "fused-zero3", "varlen-zero3"]
)
def test_one_recipe_has_the_same_losses_however_it_is_split(runs, way):
    alone = runs.losses("alone")
    assert len(alone) == STEPS and alone[-1] < alone[0]
    assert runs.losses(way) == pytest.approx(alone, rel=1e-6 if way in WAYS else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_all_processes_stop_early_at_the_same_step(runs, way):
    status = json.loads((runs.of(f"stops-{way}") / "status.json").read_text())
    assert (status["state"], status["step"], status["checkpoint"]) == (
        "finished",
        4,
        "checkpoint-4",
    )
    assert status["stopped"].startswith("stopped early at step 4: `held_out`")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_smoothed_labels_and_a_z_loss_count_the_same_however_a_step_is_split(runs, way):
    alone = runs.losses("penalized-alone")
    assert len(alone) == STEPS
    assert runs.losses(f"penalized-{way}") == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["loss", "grad_norm", "eval_held_out_loss"])
def test_a_tied_and_capped_head_learns_the_same_under_fsdp(runs, metric):
    """From the first step: its gradient came one micro-batch late when the fused loss called the head twice."""
    alone = runs.losses("capped-alone", metric)
    assert len(alone) >= 2 and runs.losses("capped", metric) == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["fused", "fused-fsdp", "fused-zero2", "fused-zero3"])
def test_the_first_batch_is_proven_on_two_processes(runs, run):
    learned = json.loads((runs.of(run) / "learned.json").read_text())
    assert learned["first_batch"]["model"]["fused_loss"] is True


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, "fewer"])
def test_a_run_that_is_changed_has_the_losses_of_one_process(runs, way):
    alone = runs.losses("changed-alone")
    assert len(alone) == 12 and alone[4] != runs.losses("alone")[4]
    assert runs.losses(f"changed-{way}") == pytest.approx(alone, rel=1e-4)


@pytest.mark.slow
def test_gradients_of_bfloat16_weights_are_added_up_in_fp32_over_micro_batches_and_processes(runs):
    """Those of the first step, before weights could differ; in bfloat16 their norms would differ by 1e-5."""
    one, two = (runs.losses(name, "grad_norm") for name in ("halves-alone", "halves"))
    assert two[0] == pytest.approx(one[0], rel=2e-6) and len(two) == STEPS


@pytest.mark.slow
def test_the_loss_of_each_source_is_that_of_all_processes_together(runs):
    """With one micro-batch a step: of several, one is looked at."""
    for metric in ("loss_domain", "loss_general", "tokens_domain"):
        alone = runs.losses("alone-at-once", metric)
        assert len(alone) >= 2 and alone != runs.losses("alone-at-once", "loss")
        for way in ("plain", "zero2", "zero3"):
            assert runs.losses(way, metric) == pytest.approx(alone, rel=1e-4), (way, metric)


@pytest.mark.slow
def test_under_zero3_two_processes_measure_and_write_what_a_plain_model_does(runs):
    logs, samples = (
        [
            [
                json.loads(line)
                for line in (runs.of(f"evaluated-{way}") / name).read_text().splitlines()
            ]
            for way in ("zero3", "alone")
        ]
        for name in ("metrics.jsonl", "samples.jsonl")
    )
    for name in ("eval_held_out_loss", "eval_held_out_tokens"):
        parted, alone = ([line[name] for line in lines if name in line] for lines in logs)
        assert len(parted) == 2 and parted == pytest.approx(alone, rel=1e-6)
    assert samples[0] == samples[1] and len(samples[0]) == 4


@pytest.mark.slow
def test_a_divided_teacher_and_a_divided_reference_change_no_loss(runs):
    assert runs.losses("distilled-zero3") == pytest.approx(runs.losses("distilled-alone"), rel=1e-4)
    assert runs.losses("dpo-zero2") == pytest.approx(runs.losses("dpo"), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["near", "near-adapted"])
@pytest.mark.parametrize("way", WAYS)
def test_rows_near_the_base_have_the_same_losses_however_they_are_split(runs, model, way):
    for metric in ("loss", "replay_kl"):
        alone = runs.losses(f"{model}-alone", metric)
        assert len(alone) >= 6 and runs.losses(f"{model}-{way}", metric) == pytest.approx(
            alone, rel=1e-4, abs=1e-6
        )
    assert alone[-1] > 10 * abs(alone[0]), "the model begins as its base"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [*WAYS, *(f"adapted-{way}" for way in ADAPTED), "rounded", "upper", "upper-zero3", "dpo"],
)
def test_it_resumes_bit_for_bit(runs, name):
    straight, again = runs.of(name), runs.of(f"{name}-again")
    assert losses(again) == losses(straight)
    last = max(again.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    assert differences(straight / last.name, last) == [] and defects(last) == []
    assert read_manifest(last).exactness.startswith(("bit-exact", "rounding: GPU"))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_in_the_background_is_what_training_would_have_waited_for(runs, way):
    waiting, behind = (runs.of(name) / "checkpoint-4" for name in (way, f"behind-{way}"))
    assert differences(waiting, behind) == [] and defects(behind) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ADAPTED)
def test_adapters_learn_what_one_process_does(runs, way):
    assert runs.losses(f"adapted-{way}") == pytest.approx(runs.losses("adapted-alone"), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["upper", *(f"upper-{way}" for way in ADAPTED)])
def test_parts_that_are_trained_by_name_learn_what_they_do_on_one_process_and_the_rest_stays(
    runs, way
):
    assert runs.losses(way) == pytest.approx(runs.losses("upper"), rel=1e-6)
    half, last, final = (
        load_file(runs.of(way) / name / "model.safetensors")
        for name in ("checkpoint-4", "checkpoint-8", "final")
    )
    assert all(last[name].equal(final[name]) for name in final) and len(final) == 21
    assert {name for name in half if not half[name].equal(last[name])} == {
        n for n in half if n.startswith(TRAINED)
    }
    if way == "upper":
        states = load_data(runs.of(way) / "checkpoint-8" / "optimizer.pt")["state"]
        assert len(states) == sum(name.startswith(TRAINED) for name in final)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_it_resumes_on_one_process(runs, way):
    assert losses(runs.of(f"fewer-{way}")) == pytest.approx(losses(runs.of(way)), rel=2e-6)
    kinds = [event["kind"] for event in read_events(runs.of(f"fewer-{way}"))]
    assert kinds == ["damaged_file", "elastic"]  # the copied run got another name in its recipe


@pytest.mark.long
def test_stages_with_losses_of_their_own_have_the_same_under_fsdp(
    corpus, tokenizer_folder, tmp_path
):
    made = Runs(tmp_path, corpus, tokenizer_folder)
    made.train(
        1,
        *(
            made.planned_stage(f"{stage}-alone", stage, "plain", processes=1)
            for stage in TOKENS_OF_STEP
        ),
    )
    made.train(
        2,
        *(
            made.planned_stage(f"{stage}-fsdp", stage, "fsdp", processes=2)
            for stage in TOKENS_OF_STEP
        ),
    )
    for stage in TOKENS_OF_STEP:
        alone = made.losses(f"{stage}-alone")
        # Steps are larger and losses steeper than in pre-training.
        assert len(alone) >= 4 and made.losses(f"{stage}-fsdp") == pytest.approx(alone, rel=2e-5), (
            stage
        )

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from causal_families import small_config
from run_folders import write_lines
from tiny import TINY_LLAMA, tiny_config
from tiny_trainers import losses, trainer_of
from torch import _dynamo as dynamo
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from cpt.checkpoints.resume import ResumePoint
from cpt.checkpoints.transaction import SaveFailed
from cpt.errors import Interrupted, RecipeError, ResourceError, TrainingError
from cpt.models.layers import CompiledCall, decoder_layers
from cpt.runs.events import read_events
from cpt.training import trainer as module
from cpt.training.arguments import RunLength
from cpt.training.callbacks import Alert, Tracker
from cpt.training.contents import BIT_EXACT, MOVED
from cpt.training.guards import Decision, Event
from cpt.training.loss_guard import STEPS_BEHIND
from cpt.training.trainer import CPTTrainer

pytestmark = pytest.mark.heavy

TINY_MOE = {
    **TINY_LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.5,
}
TINY_BAMBA = {
    **TINY_LLAMA,
    "model_type": "bamba",
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "attn_layer_indices": [1],
    "z_loss_coefficient": 0.5,
}


class FewerLabels(torch.utils.data.Dataset):
    """The rows, of which each has fewer labels than the one before."""

    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, number):
        row = self.rows[number]
        return row | {"labels": row["labels"].where(torch.arange(64) >= 15 * (number % 4), -100)}


@pytest.mark.parametrize(
    ("config", "micro_batch", "averages"),
    [
        (TINY_LLAMA, 1, True),
        (TINY_MOE, 1, True),
        (TINY_MOE, 1, False),
        (TINY_MOE, 4, True),
        (TINY_BAMBA, 1, True),
        (TINY_BAMBA, 4, True),
    ],
    ids=["dense", "experts", "by process", "experts at once", "z-loss", "z-loss at once"],
)
def test_a_step_is_the_mean_over_its_labels_however_they_are_spread(
    tiny_recipe, tmp_path, config, micro_batch, averages
):
    """Of penalties, which have no labels, it is the mean over the micro-batches."""
    tiny_recipe["model"]["config"] = config
    tiny_recipe["training"]["per_device_train_batch_size"] = micro_batch
    tiny_recipe["training"]["average_tokens_across_devices"] = averages
    trainer = trainer_of(tiny_recipe, tmp_path, steps=1)
    trainer.rows = FewerLabels(trainer.rows)
    rows = [trainer.rows[number] for number in range(4)]
    routed = {"output_router_logits": True} if config is TINY_MOE else {}
    summed, num_labels, penalties = 0.0, 0, []
    for first in range(0, 4, micro_batch):
        batch = {
            key: torch.stack([row[key] for row in rows[first : first + micro_batch]])
            for key in rows[0]
        }
        targets = batch.pop("labels")[:, 1:].flatten()
        with torch.no_grad():
            outputs = trainer.model(**batch, **routed)
        summed += cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), targets, reduction="sum"
        ).item()
        num_labels += int((targets != -100).sum())
        z_loss = outputs.logits.logsumexp(-1).square().mean()
        penalty = outputs.aux_loss if routed else z_loss * (config is TINY_BAMBA)
        penalties.append(0.5 * penalty.item())
    trainer.train()
    assert losses(trainer)[1] == pytest.approx(
        summed / num_labels + sum(penalties) / len(penalties), rel=1e-5
    )


@pytest.fixture
def held_out(corpus):
    return {"perplexity": [{"path": str(corpus / "held_out.jsonl")}]}


# --- label smoothing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        TINY_LLAMA,
        tiny_config("cpt-gpt2", vocab_size=384, unpadded_vocab_size=320),
        pytest.param(TINY_BAMBA, marks=pytest.mark.slow),
    ],
    ids=["llama", "padded vocabulary", "z-loss"],
)
def test_labels_are_smoothed_over_the_words_and_only_in_training(
    tiny_recipe, tmp_path, held_out, config
):
    tiny_recipe["model"]["config"] = {**config, "initializer_range": 0.3}
    tiny_recipe["training"]["per_device_train_batch_size"] = 1
    evaluated, trained = [], []
    for smoothing in (0.0, 0.2):
        training = {**tiny_recipe["training"], "label_smoothing_factor": smoothing}
        changes = {"training": training, "evaluation": held_out}
        trainer = trainer_of(tiny_recipe, tmp_path, steps=1, **changes)
        evaluated.append(trainer.evaluate())
        rows = [trainer.rows[number] for number in range(4)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        labels = batch.pop("labels")[:, 1:].flatten()
        with torch.no_grad():
            logits = trainer.model(**batch).logits[:, :-1, :320].flatten(0, 1)
        trainer.train()
        expected = cross_entropy(logits, labels, label_smoothing=smoothing).item()
        trained.append(losses(trainer)[1] - expected)
    assert trained[1] == pytest.approx(trained[0], abs=1e-5)
    assert evaluated[1] == evaluated[0]


def test_labels_of_a_stage_with_another_loss_are_not_smoothed(tiny_recipe, tmp_path):
    tiny_recipe |= {"stage": "dpo"}
    tiny_recipe["training"] |= {"label_smoothing_factor": 0.1}
    with pytest.raises(RecipeError, match="training.label_smoothing_factor"):
        trainer_of(tiny_recipe, tmp_path)


def test_a_family_that_does_not_shift_labels_is_refused(tiny_recipe, tmp_path):
    tiny_recipe["model"]["config"] = small_config("bart", vocab_size=320).to_diff_dict()
    with pytest.raises(RecipeError, match="BartForCausalLM does not shift labels"):
        trainer_of(tiny_recipe, tmp_path)


# --- evaluation ---


def test_held_out_metrics_do_not_depend_on_the_packing(tiny_recipe, tmp_path, held_out):
    tiny_recipe["training"]["per_device_train_batch_size"] = 1
    figures = []
    for packing in ("best_fit", "token_budget"):
        data = {**tiny_recipe["data"], "sequence_length": 256, "packing": packing}
        figures.append(trainer_of(tiny_recipe, tmp_path, data=data, evaluation=held_out).evaluate())
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)


def test_out_of_memory_in_an_evaluation_names_the_evaluations_batch_size(
    tiny_recipe, tmp_path, held_out, monkeypatch
):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    trainer = trainer_of(tiny_recipe, tmp_path, evaluation=held_out)
    monkeypatch.setattr("cpt.training.trainer.measure_and_keep", full)
    with pytest.raises(
        ResourceError, match=r"evaluation of step 0.*`training.per_device_eval_batch_size`"
    ):
        trainer.train()


# --- compiled layers ---


@pytest.fixture
def fresh_compiler():
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


def test_layers_are_compiled_and_nothing_around_them(fresh_compiler, tiny_recipe, tmp_path):
    tiny_recipe["training"]["torch_compile"] = True
    trainer = trainer_of(tiny_recipe, tmp_path)
    compiled = [
        module
        for module in trainer.model.modules()
        if isinstance(module._compiled_call_impl, CompiledCall)
    ]
    assert (
        compiled == decoder_layers(trainer.model)
        and trainer.accelerator.state.dynamo_plugin.backend == "NO"
    )


# --- parts of the trainer, without a run -----------------------------------------------------------------------------


def part_of(**fields):
    """The part of a trainer at step 6 of 9 that a method reads."""
    state = TrainerState(global_step=6, max_steps=9)
    return SimpleNamespace(**{"state": state, "control": TrainerControl()} | fields)


@pytest.mark.parametrize(
    ("first_step", "process", "row"), [(3, 2, 22), (0, 0, 0), (0, 1, 2), (5, 2, 4), (4, 3, 0)]
)
def test_the_first_row_of_a_process_is_that_of_its_first_micro_batch(first_step, process, row):
    trainer = part_of(
        first_step=first_step,
        length=RunLength(5, 6, 1, tokens_per_step=384, micro_batch=2),
        args=SimpleNamespace(process_index=process, per_device_train_batch_size=2),
        rows=range(100),
    )
    assert CPTTrainer.first_row(trainer) == row


@pytest.mark.parametrize("flag", ["save", "log", "evaluate", "training_stop", "kind", None])
@pytest.mark.parametrize("kind", ["weights", "tasks"])
def test_the_host_reads_all_verdicts_before_they_are_logged_measured_or_saved(flag, kind):
    asked = []
    followed = []
    saved = []

    def decisions(*, unread: int):
        asked.append(unread)
        return iter(["a", "b"])

    checkpointer = SimpleNamespace(
        wait=lambda: saved.append("waits"),
        save=lambda contents, kind, spared: saved.append((contents, kind, spared)),
    )
    trainer = part_of(
        weights_due=kind if flag in ("kind", "save") else None,
        guard=SimpleNamespace(decisions=decisions),
        follow=followed.append,
        checkpointer=checkpointer,
        contents=lambda kind: f"contents of {kind}",
        best_checkpoints={"the best"},
    )
    control = TrainerControl()
    if flag not in ("kind", None):
        setattr(control, f"should_{flag}", True)
    CPTTrainer.finish_step(trainer, control)
    assert asked == [STEPS_BEHIND if flag is None else 0] and followed == ["a", "b"]
    expected = ["waits", (f"contents of {kind}", kind, {"the best"})] if flag == "kind" else []
    assert saved == expected


@pytest.mark.parametrize(
    ("every", "is_due", "kind"),
    [(3, True, "weights"), (4, True, "tasks"), (None, True, "tasks"), (4, False, None)],
)
def test_weights_come_before_tasks_of_the_same_step(every, is_due, kind):
    checkpoints = SimpleNamespace(weights_every_steps=every)
    trainer = part_of(
        recipe=SimpleNamespace(checkpoints=checkpoints),
        tasks=SimpleNamespace(is_due=lambda step: is_due and step == 6),
    )
    assert CPTTrainer.weights_due.fget(trainer) == kind


def test_scores_go_to_trackers_and_alerts_only(tmp_path):
    heard = []

    class Tracks(Tracker):
        def __init__(self, name):
            self.name = name

        def on_log(self, args, state, control, logs):
            heard.append((self.name, state.global_step, logs))

    alert = Alert(tmp_path, metric="task_acc", below=0.5)
    handler = SimpleNamespace(callbacks=[Tracks("a"), object(), alert, Tracks("b")])
    trainer = part_of(callback_handler=handler, args=None)
    trainer.state.is_world_process_zero = True
    CPTTrainer.report_scores(trainer, {"task_acc": 0.25})
    assert heard == [(name, 6, {"task_acc": 0.25}) for name in ("a", "b")]
    assert [event["kind"] for event in read_events(tmp_path)] == ["alert"]


@pytest.mark.parametrize(
    ("action", "step", "is_stopping"),
    [("continue", 6, None), ("roll_back", 6, True), ("roll_back", 9, False), ("abort", 6, None)],
)
def test_a_decision_is_recorded_before_it_is_followed(action, step, is_stopping, monkeypatch):
    recorded = []
    rolled_back = []
    monkeypatch.setattr(
        module,
        "roll_back",
        lambda decision, guard, folder, is_stopping: rolled_back.append(is_stopping),
    )
    checkpointer = SimpleNamespace(
        record=lambda kind, message, **details: recorded.append((kind, message, details)),
        describe_newest=lambda: "The newest is 4.",
        wait=lambda: recorded.append("waits"),
    )
    trainer = part_of(checkpointer=checkpointer, guard=None, run_folder=None)
    trainer.record_events = partial(CPTTrainer.record_events, trainer)
    trainer.state.global_step = step
    trainer.control.should_training_stop = True
    decision = Decision(action, (Event("a", "b", {"step": 6}),), "It diverged.", step=6)
    if action == "abort":
        with pytest.raises(TrainingError, match="^It diverged. The newest is 4.$"):
            CPTTrainer.follow(trainer, decision)
    else:
        CPTTrainer.follow(trainer, decision)
    waits = ["waits"] if action == "roll_back" else []
    assert recorded == [("a", "b", {"step": 6}), *waits]
    assert rolled_back == ([] if is_stopping is None else [is_stopping])


@pytest.mark.parametrize(
    ("begun", "updating", "has_begun", "is_mid"),
    [
        (7, True, False, True),
        (7, False, True, True),
        (7, False, False, False),
        (6, True, True, False),
    ],
)
def test_a_step_is_in_the_middle_of_its_update_until_it_is_counted(
    begun, updating, has_begun, is_mid
):
    trainer = part_of(
        begun_step=begun,
        checked_step=SimpleNamespace(is_updating=updating),
        engine=SimpleNamespace(has_begun_update=has_begun),
    )
    assert CPTTrainer.is_mid_update.fget(trainer) is is_mid


def after_error(*, newest=5, disagreement="", failure=None, problem=None, drawn_after=6):
    """What `save_after_error` returns, and what it did."""
    done = []

    def save(contents, kind, spared):
        done.append((contents, kind, spared))
        if problem is not None:
            raise problem

    agreement = SimpleNamespace(after_error=lambda point: done.append(point) or disagreement)
    checkpointer = SimpleNamespace(
        newest_step=newest,
        agreement=agreement,
        wait=lambda: done.append("waits"),
        save=save,
        save_failure=failure,
    )
    trainer = part_of(
        checkpointer=checkpointer,
        is_mid_update=False,
        begun_step=7,
        args=None,
        random_states_before=(drawn_after, "states"),
        guard=SimpleNamespace(decisions=lambda: ["a decision"]),
        record_events=done.append,
        contents=lambda kind: f"contents of {kind}",
        best_checkpoints={"best"},
    )
    return CPTTrainer.save_after_error(trainer), done


def test_after_an_error_the_step_is_saved_with_its_random_numbers(monkeypatch):
    restored = []
    monkeypatch.setattr(module, "set_random_states", lambda args, states: restored.append(states))
    save = ("contents of full", "full", {"best"})
    saved = [(6, 7), "a decision", "waits", save, "waits"]
    assert after_error() == ("", saved) and restored == ["states"]
    assert after_error(drawn_after=5) == ("", saved) and len(restored) == 1
    assert after_error(newest=6) == ("", [])
    assert after_error(disagreement="they differ") == ("they differ", [(6, 7)])
    assert after_error(problem=OSError("the disk is gone"))[0] == "the disk is gone"
    assert after_error(failure=SaveFailed("storage", "full"))[0] == "full"


@pytest.mark.parametrize(
    ("strategy", "every", "first_step", "measured", "evaluates"),
    [
        ("steps", 4, 8, [4], True),
        ("steps", 4, 8, [4, 8], False),
        ("steps", 4, 7, [4], False),
        ("steps", 4, 9, [4], True),  # the last step
        ("no", 4, 8, [], False),
    ],
)
def test_an_evaluation_that_a_signal_prevented_is_made_up_for(
    strategy, every, first_step, measured, evaluates, tmp_path
):
    lines = [{"step": step, "tokens": 9, "eval_a_loss": 1.0} for step in measured]
    lines += [{"step": step, "tokens": 9, "loss": 1.0} for step in range(1, 10)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    TrainerState(global_step=first_step).save_to_json(str(checkpoint / "trainer_state.json"))
    (checkpoint / "a.json").write_text('{"row": 3}')
    loaded = []
    parts = [SimpleNamespace(file=name, load_state_dict=loaded.append) for name in ("a.json", "b")]
    arguments = SimpleNamespace(
        eval_strategy=IntervalStrategy(strategy), eval_steps=every, max_steps=9, eval_on_start=True
    )
    trainer = part_of(stateful=parts, args=arguments, run_folder=tmp_path)
    CPTTrainer.continue_from(trainer, checkpoint)
    assert (trainer.first_step, loaded) == (first_step, [{"row": 3}])
    assert arguments.eval_on_start is evaluates


def test_the_rates_of_the_recipe_replace_those_of_a_checkpoint():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    groups = [{"params": [weight], "lr": 9.0} for weight in weights]
    optimizer = torch.optim.SGD(groups, lr=9.0)
    schedule = LambdaLR(
        optimizer, [lambda step: 1.0, lambda step: 0.5, lambda step: 1 / (1 + step)]
    )
    for _ in range(3):
        optimizer.step()
        schedule.step()
    wrapped = SimpleNamespace(scheduler=SimpleNamespace(scheduler=schedule))
    trainer = part_of(
        lr_scheduler=wrapped,
        peak_rates=[0.1, 0.2, 0.4],
        engine=SimpleNamespace(optimizer=optimizer),
    )
    CPTTrainer.set_rates(trainer)
    expected = [0.1, 0.1, 0.1]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected)
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.4]
    assert schedule.get_last_lr() == pytest.approx(expected)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.1, 0.08])


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("is_main", [True, False])
def test_the_parts_of_a_converted_checkpoint_are_removed_once_all_have_loaded_them(
    stage, is_main, monkeypatch
):
    done = []
    for name in ("stop_loading_universal", "separate_groups", "remove_parts"):
        monkeypatch.setattr(module, name, lambda *given, name=name: done.append((name, *given)))
    engine = SimpleNamespace(zero_optimization_stage=lambda: stage)
    trainer = part_of(
        model_wrapped=engine,
        engine=SimpleNamespace(optimizer="the optimizer"),
        accelerator=SimpleNamespace(wait_for_everyone=lambda: done.append(("all wait",))),
        args=SimpleNamespace(should_save=is_main),
    )
    CPTTrainer.finish_universal(trainer, "a checkpoint")
    groups = [("separate_groups", "the optimizer", "a checkpoint")] if stage == 3 else []
    removed = [("remove_parts", "a checkpoint")] if is_main else []
    assert done == [("stop_loading_universal", engine), *groups, ("all wait",), *removed]


@pytest.mark.parametrize("kind", ["full", "weights", "tasks"])
@pytest.mark.parametrize(
    ("moved", "exactness", "expected"),
    [(False, BIT_EXACT, BIT_EXACT), (True, BIT_EXACT, MOVED), (True, "elastic: x", "elastic: x")],
)
def test_a_manifest_says_what_its_checkpoint_is_of(kind, moved, exactness, expected, monkeypatch):
    monkeypatch.setattr(module, "exactness_of_run", lambda *_: exactness)
    trainer = part_of(
        engine=SimpleNamespace(zero_section={"stage": 2} if moved else None),
        has_moved_optimizer=moved,
        length=RunLength(9, 4, 1, tokens_per_step=300, micro_batch=4),
        args=SimpleNamespace(world_size=3),
        point=ResumePoint(),
        recipe=None,
        run_folder=None,
    )
    manifest = CPTTrainer.manifest(trainer, kind)
    assert manifest.kind == ("full" if kind == "full" else "weights")
    assert (manifest.step, manifest.tokens, manifest.world_size) == (6, 1800, 3)
    assert (manifest.exactness, manifest.zero_stage) == (expected, 2 if moved else None)
    assert (manifest.files, manifest.weight_decay) == ({}, "by role")


def test_new_random_numbers_differ_by_seed_step_and_process():
    def seed(number, step, process):
        trainer = part_of(args=SimpleNamespace(seed=number, process_index=process))
        trainer.state.global_step = step
        return CPTTrainer.seed_of_step.fget(trainer)

    cases = [(1, 6, 0), (2, 6, 0), (1, 7, 0), (1, 6, 1), (16, 0, 0)]
    seeds = [seed(*case) for case in cases]
    assert len(set(seeds)) == 5 and seeds == [seed(*case) for case in cases]
    assert all(0 <= value < 2**32 for value in seeds)


def test_a_signal_in_an_evaluation_saves_and_stops_and_logs_nothing():
    resharded = []

    def measure():
        raise Interrupted("stopped by SIGTERM")

    trainer = part_of(
        optimizer=None,
        measure_held_out=measure,
        engine=SimpleNamespace(reshard=lambda: resharded.append("engine")),
    )
    assert CPTTrainer.evaluate(trainer) == {}
    assert trainer.control.should_save and trainer.control.should_training_stop
    assert resharded == ["engine"]


def test_a_fused_loss_is_refused_where_a_stage_has_another_loss(tmp_path):
    class OfLogits(CPTTrainer):
        trains_on_model_loss = False

    recipe = SimpleNamespace(stage="mine", model=SimpleNamespace(fused_loss=True))
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(RecipeError, match="model.fused_loss: stage `mine` uses another loss"):
        OfLogits(recipe, torch.nn.Linear(2, 2), arguments, rows=[], length=None)
    assert arguments.ddp_find_unused_parameters is arguments.ddp_broadcast_buffers is False


class Preparing:
    """The part of a trainer that resuming prepares; `done` has what it did, in order."""

    def __init__(self, monkeypatch, **fields):
        self.done = []
        for name in (
            *("load_shards", "convert_adamw", "replay_step_counter", "load_data"),
            "return_to_training_point",
        ):
            answer = True if name == "convert_adamw" else f"of {name}"
            monkeypatch.setattr(module, name, self.note(name, answer))
        monkeypatch.setattr(module, "only_data", self.only_data)
        engine = SimpleNamespace(
            optimizer="optimizer",
            reshard=self.note("reshard"),
            load_universal=self.note("load_universal"),
        )
        self.trainer = part_of(
            engine=engine,
            point=ResumePoint(trusted=True),
            model="model",
            lr_scheduler="schedule",
            is_fsdp_enabled=False,
            is_deepspeed_enabled=False,
            has_moved_optimizer=False,
            set_rates=self.note("set_rates"),
            finish_universal=self.note("finish_universal"),
            **fields,
        )

    def note(self, name, answer=None):
        def call(*given, **options):
            self.done.append((name, *given, *options.items()))
            return answer

        return call

    @contextmanager
    def only_data(self, checkpoint, *, trust):
        self.done.append(("only data", trust))
        yield
        self.done.append(("any pickle",))

    def prepare(self, checkpoint):
        self.done.append(("prepare", checkpoint))
        return "prepared"


def test_a_sharded_model_is_loaded_after_it_was_prepared(tmp_path, monkeypatch):
    preparing = Preparing(monkeypatch)
    preparing.trainer.is_fsdp_enabled = True
    prepared = CPTTrainer.prepare_from(preparing.trainer, tmp_path, preparing.prepare)
    assert prepared == "prepared" and preparing.done == [
        ("prepare", None),
        ("reshard",),
        ("load_shards", tmp_path, "model", "optimizer", "schedule", ("trust", True)),
        ("set_rates",),
    ]


@pytest.mark.parametrize("has_point", [True, False])
def test_pickles_of_a_plain_checkpoint_are_data_while_it_is_loaded(
    has_point, tmp_path, monkeypatch
):
    preparing = Preparing(monkeypatch)
    point = tmp_path / "training_point.pt"
    if has_point:
        point.touch()
    prepared = CPTTrainer.prepare_from(preparing.trainer, tmp_path, preparing.prepare)
    moved = [
        ("load_data", point, ("trust", True)),
        ("return_to_training_point", "model", "of load_data"),
    ]
    assert prepared == "prepared" and preparing.done == [
        ("only data", True),
        ("prepare", str(tmp_path)),
        ("any pickle",),
        *(moved if has_point else []),
        ("set_rates",),
    ]
    assert preparing.trainer.has_moved_optimizer is False


@pytest.mark.parametrize("is_universal", [True, False])
def test_deepspeed_loads_parts_or_a_converted_checkpoint(is_universal, tmp_path, monkeypatch):
    preparing = Preparing(monkeypatch)
    preparing.trainer.is_deepspeed_enabled = True
    if is_universal:
        (tmp_path / "latest_universal").touch()
    CPTTrainer.prepare_from(preparing.trainer, tmp_path, preparing.prepare)
    assert preparing.done == [
        *([("load_universal",)] if is_universal else []),
        ("only data", True),
        ("prepare", str(tmp_path)),
        ("any pickle",),
        *([("finish_universal", tmp_path)] if is_universal else []),
        ("convert_adamw", "optimizer"),
        ("replay_step_counter", "optimizer"),
        ("set_rates",),
    ]
    assert preparing.trainer.has_moved_optimizer is True

"""Checkpoints of models that several processes share: FSDP2's parts, and DeepSpeed's."""

import shutil

import pytest
import torch
from launching import launch, zero_profile
from one_process_group import alone_in_a_group
from tiny import write_recipe
from tiny_models import make_tokenizer, tiny_config
from tiny_training import steps
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from cpt.checkpoints.manifest import MANIFEST, file_of_part
from cpt.checkpoints.sharding import (
    capture_states,
    consolidated_state,
    full_weights,
    load_parts,
    make_universal,
    part_here,
    read_parts,
    whole,
)
from cpt.errors import CheckpointError
from cpt.export.trained import find_trained
from cpt.export.write import ExportOptions, export_whole
from cpt.models.build import build_model
from cpt.optim.build import build_optimizer
from cpt.recipe.schema import Model, Optimizer


@pytest.fixture
def group():
    with alone_in_a_group():
        yield


def tiny_model(seed):
    return build_model(
        Model(from_scratch=True, config=tiny_config("llama")), make_tokenizer(), seed=seed
    )


def sharded(seed):
    """A tiny model in FSDP2's parts, with its optimizer."""
    model = tiny_model(seed)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, build_optimizer(Optimizer(learning_rate=1e-2), model)


@pytest.mark.heavy
def test_an_fsdp_model_resumes_from_its_parts_bit_for_bit(group, tmp_path):
    model, optimizer = sharded(seed=1)
    steps(model, optimizer, 2)
    path = tmp_path / file_of_part(0, 1)
    path.parent.mkdir()
    torch.save(part_here(model, optimizer), path)
    straight = steps(model, optimizer, 2)
    again, its_optimizer = sharded(seed=2)
    load_parts(tmp_path, again, its_optimizer)
    assert all(isinstance(state["exp_avg"], DTensor) for state in its_optimizer.state.values())
    assert steps(again, its_optimizer, 2) == straight


def test_the_weights_of_an_fsdp_model_are_gathered_for_the_models_file(group):
    model, _ = sharded(seed=1)
    found, expected = full_weights(model, only_trained=False), tiny_model(seed=1).state_dict()
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.fixture
def of_two_processes(tmp_path):
    """A checkpoint of one parameter of three rows."""
    rows = torch.arange(12.0).view(3, 4)
    (tmp_path / "fsdp").mkdir()
    for rank, mine in enumerate((rows[:2], rows[2:])):
        state = {"step": torch.tensor(3.0), "exp_avg": {"shape": [3, 4], "rows": mine * 2}}
        part = {
            "format": 1,
            "weights": {"w": {"shape": [3, 4], "rows": mine}},
            "states": {"w": state},
        }
        torch.save(part, tmp_path / file_of_part(rank, 2))
    return tmp_path


def test_one_process_reads_the_rows_of_several(of_two_processes):
    model = torch.nn.ParameterDict({"w": torch.zeros(3, 4)})
    optimizer = torch.optim.AdamW(model.parameters())
    load_parts(of_two_processes, model, optimizer)
    rows, state = torch.arange(12.0).view(3, 4), optimizer.state[model["w"]]
    assert (
        torch.equal(model["w"], rows)
        and torch.equal(state["exp_avg"], 2 * rows)
        and state["step"] == 3
    )
    no_rows = {"shape": [1, 2], "rows": torch.ones(0, 2)}
    assert whole([{"shape": [1, 2], "rows": torch.ones(1, 2)}, no_rows]).tolist() == [[1, 1]]


def test_parts_of_another_model_or_without_one_processs_part_are_refused(of_two_processes):
    other = torch.nn.ParameterDict({"v": torch.zeros(3, 4)})
    with pytest.raises(CheckpointError, match="another model"):
        load_parts(of_two_processes, other, torch.optim.AdamW(other.parameters()))
    (of_two_processes / file_of_part(1, 2)).unlink()
    with pytest.raises(CheckpointError, match="fsdp/"):
        read_parts(of_two_processes, trust=False)


# --- DeepSpeed; whole runs: tests/end_to_end/test_splitting.py -------------------------------------------------------


class Engine:
    """The part of DeepSpeed's engine that saving uses."""

    checkpoint_engine, global_steps = "DeepSpeed's", 3

    def _copy_recovery_script(self, folder):
        raise AssertionError("it would write")

    def save_checkpoint(self, folder):
        self.checkpoint_engine.makedirs(f"{folder}/global_step3", exist_ok=True)
        self.checkpoint_engine.create(None)
        self.checkpoint_engine.save(state_dict={"step": 3}, path=f"{folder}/global_step3/states.pt")
        self._copy_recovery_script(folder)
        assert self.checkpoint_engine.commit(None)


def test_deepspeeds_states_are_captured_without_writing_and_the_engine_is_left_as_it_was(tmp_path):
    engine = Engine()
    with capture_states(engine, str(tmp_path / "nowhere")) as states:
        engine.save_checkpoint(str(tmp_path / "nowhere"))
    assert states == {"global_step3/states.pt": {"step": 3}} and list(tmp_path.iterdir()) == []
    assert engine.checkpoint_engine == "DeepSpeed's"
    with pytest.raises(AssertionError, match="it would write"):
        engine._copy_recovery_script(tmp_path)


def test_zero_parts_that_cannot_be_read_are_refused_and_leave_nothing(tmp_path):
    checkpoint = tmp_path / "checkpoint-4"
    (checkpoint / "global_step4").mkdir(parents=True)
    (checkpoint / "latest").write_text("global_step4")
    (checkpoint / "global_step4" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(
        bytes(1000)
    )
    with pytest.raises(CheckpointError, match="checkpoint-4"):
        consolidated_state(checkpoint)
    with pytest.raises(CheckpointError, match="checkpoint-4"):
        make_universal(checkpoint, tmp_path)
    assert list(tmp_path.iterdir()) == [checkpoint]


@pytest.mark.long
def test_a_checkpoint_of_which_only_zeros_parts_are_left_is_exported(tiny_recipe, tmp_path):
    tiny_recipe["training"] |= {"bf16": True, "deepspeed": zero_profile(tmp_path, 3)}
    ended = launch(write_recipe(tiny_recipe, tmp_path / "r.yaml"), processes=2)
    assert ended.returncode == 0, ended.stderr
    run, ids = tmp_path / "runs" / "tiny", torch.arange(30).unsqueeze(0)
    parts = shutil.copytree(run / "checkpoint-8", run / "checkpoint-9")
    # As the Trainer leaves it where DeepSpeed does not gather the weights.
    for file in [*parts.glob("*.safetensors"), parts / MANIFEST]:
        file.unlink()
    assert find_trained(parts).kind == "zero"
    list(export_whole(find_trained(parts), tmp_path / "export", ExportOptions(torch.bfloat16)))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)(
        ids
    ).logits
    final = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32)(ids).logits
    assert torch.allclose(exported, final, atol=5e-3)  # final was rounded to bf16 elsewhere

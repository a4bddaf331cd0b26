"""Checkpoints of models that several processes share: FSDP2's parts, and DeepSpeed's."""

import shutil
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from launching import launch, zero_profile
from one_process_group import alone_in_a_group
from tiny import write_recipe
from tiny_models import make_tokenizer, tiny_config
from tiny_run import save_checkpoint, seal
from tiny_training import steps
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from cpt.checkpoints.manifest import MANIFEST, file_of_part
from cpt.checkpoints.sharding import (
    capture_states,
    consolidated_state,
    full_weights,
    is_zero,
    load_consolidated,
    load_parts,
    make_universal,
    name_sharding,
    part_here,
    read_parts,
    remove_parts,
    remove_universal,
    scripts_of_deepspeed,
    sharding_in,
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


@contextmanager
def one_of(processes, rank):
    """As this process of several, which say nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    try:
        yield init_device_mesh("cpu", (processes,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("length", "processes", "rank", "begin", "end"),
    [(5, 2, 0, 0, 3), (5, 2, 1, 3, 5), (5, 3, 1, 2, 4), (5, 3, 2, 4, 5), (4, 3, 2, 4, 4)],
)
def test_each_of_any_number_of_processes_reads_its_own_rows(
    tmp_path, length, processes, rank, begin, end
):
    rows = torch.arange(length * 3.0).view(length, 3)
    (tmp_path / "fsdp").mkdir()
    for number, mine in enumerate((rows[:2], rows[2:3], rows[3:])):
        ids = {"shape": [length, 3], "rows": mine.to(torch.uint8)}
        state = {"step": torch.tensor(3.0), "rate": 0.5, "codes": ids}
        state |= {"exp_avg": {"shape": [length, 3], "rows": mine * 2}}
        part = {"format": 1, "weights": {"w": {"shape": [length, 3], "rows": mine}}}
        torch.save({**part, "states": {"w": state}}, tmp_path / file_of_part(number, 3))
    with one_of(processes, rank) as mesh:
        local = torch.zeros(end - begin, 3, dtype=torch.bfloat16)
        here = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=(length, 3), stride=(3, 1)
        )
        model = torch.nn.ParameterDict({"w": torch.nn.Parameter(here)})
        optimizer = torch.optim.AdamW(model.parameters())
        load_parts(tmp_path, model, optimizer)
        for path in (tmp_path / "fsdp").iterdir():  # nothing is read from the files any more
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))
        assert torch.equal(model["w"].to_local().float(), rows[begin:end])
        state = optimizer.state[model["w"]]
        assert (state["step"], state["rate"]) == (3, 0.5)
        for name, dtype, factor in (("exp_avg", torch.bfloat16, 2), ("codes", torch.uint8, 1)):
            found = state[name]
            assert (found.shape, found.dtype) == ((length, 3), dtype)
            assert torch.equal(found.to_local().float(), factor * rows[begin:end])


def test_only_rows_can_be_saved_and_a_state_that_is_not_there_yet_stays_so(tmp_path):
    with one_of(2, 0) as mesh:
        column = DTensor.from_local(torch.zeros(4, 2), mesh, [Shard(1)], run_check=False)
        model = torch.nn.ParameterDict({"w": torch.nn.Parameter(column)})
        with pytest.raises(CheckpointError, match="w is sharded by .*; only sharding by rows"):
            part_here(model, torch.optim.AdamW(model.parameters()))
    plain = torch.nn.ParameterDict({"w": torch.ones(3), "frozen": torch.ones(2)})
    plain["frozen"].requires_grad_(False)
    optimizer = torch.optim.AdamW([plain["w"]])
    part = part_here(plain, optimizer)
    assert part["format"] == 1 and part["states"] == {"w": {}} and part["weights"].keys() == {"w"}
    assert part["weights"]["w"]["shape"] == [3]
    (tmp_path / "fsdp").mkdir()
    torch.save(part, tmp_path / file_of_part(0, 1))
    load_parts(tmp_path, plain, optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("lacking", [{0}, {1}, {2}, {0, 1, 2}])
def test_all_parts_of_the_processes_that_wrote_are_needed(tmp_path, lacking):
    (tmp_path / "fsdp").mkdir()
    for rank in {0, 1, 2} - lacking:
        torch.save({}, tmp_path / file_of_part(rank, 3))
    with pytest.raises(CheckpointError, match="lacks parts in fsdp/"):
        read_parts(tmp_path, trust=False)


def test_how_a_checkpoint_is_sharded_is_read_from_its_manifest_or_its_files(tmp_path):
    found = []
    for number, (about, files) in enumerate(
        [({}, []), ({}, ["fsdp/part_0_of_1.pt"]), ({"zero_stage": 2}, ["latest"])]
    ):
        checkpoint = save_checkpoint(tmp_path / str(number), 4, sealed=False)
        for name in files:
            (checkpoint / name).parent.mkdir(exist_ok=True)
            (checkpoint / name).touch()
        from_files = sharding_in(checkpoint)
        seal(checkpoint, 4, **about)
        found.append((from_files, sharding_in(checkpoint)))
    assert found == [("plain", "plain"), ("fsdp", "fsdp"), ("zero-", "zero-2")]
    assert [is_zero(one) for pair in found for one in pair] == [False] * 4 + [True] * 2
    assert [name_sharding(one) for one in ("plain", "fsdp", "zero-", "zero-3")] == [
        "no sharding (one process or DDP)",
        "FSDP2",
        "DeepSpeed ZeRO",
        "DeepSpeed ZeRO-3",
    ]


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


def test_a_conversion_asks_deepspeed_for_all_and_adds_the_small_files(tmp_path, monkeypatch):
    checkpoint = save_checkpoint(tmp_path / "run", 14)
    (checkpoint / "latest").write_text("global_step14\n")
    (checkpoint / "rng_state_1.pth").touch()
    leftover = tmp_path / "run" / ".universal-14"
    leftover.mkdir()
    (leftover / "of a killed process").touch()
    asked = []

    def convert(arguments):
        asked.append(vars(arguments))
        (leftover / "global_step14_universal").mkdir()
        (leftover / "latest_universal").write_text("global_step14_universal\n")
        print("what DeepSpeed says")

    monkeypatch.setattr("deepspeed.checkpoint.ds_to_universal.main", convert)
    assert make_universal(checkpoint, tmp_path / "run") == leftover
    assert asked == [
        {
            "input_folder": f"{checkpoint}/global_step14",
            "output_folder": f"{leftover}/global_step14_universal",
            "num_extract_workers": 1,
            "num_merge_workers": 1,
            "keep_temp_folder": False,
            "strict": True,
            "inject_missing_state": True,
        }
    ]
    small = ["config.json", "manifest.json", "rng_state.pth", "rng_state_1.pth", "scheduler.pt"]
    small += ["trainer_state.json"]
    found = sorted(path.name for path in leftover.iterdir())
    assert found == sorted([*small, "global_step14_universal", "latest_universal"])
    remove_parts(leftover)
    assert sorted(path.name for path in leftover.iterdir()) == sorted([*small, "latest_universal"])
    (tmp_path / "run" / ".universal-file").touch()
    remove_universal(tmp_path / "run")
    found = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert found == [".universal-file", "checkpoint-14"], "what cannot be removed stays"


def test_consolidated_weights_need_all_that_is_trained_and_nothing_else(tmp_path, monkeypatch):
    stored = {"0.weight": torch.ones(2, 3), "1.weight": torch.full((2, 2), 2.0)}

    def loaded(changes, *without):
        state = {name: value for name, value in (stored | changes).items() if name not in without}
        monkeypatch.setattr("cpt.checkpoints.sharding.consolidated_state", lambda _: state)
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
        )
        model[1].requires_grad_(False)
        load_consolidated(model, tmp_path / "checkpoint-4")
        return model

    assert all(torch.equal(loaded({}).state_dict()[name], stored[name]) for name in stored)
    assert torch.equal(loaded({}, "1.weight")[0].weight, stored["0.weight"]), "frozen ones may lack"
    for changes, without, named in (
        ({}, ["0.weight"], r"1 tensors differ: 0.weight\)"),
        ({name: torch.ones(1) for name in "abcd"}, [], r"4 tensors differ: a, b, c\)"),
        ({"0.weight": torch.ones(3, 3)}, [], "size mismatch for 0.weight"),
    ):
        with pytest.raises(CheckpointError, match=f"checkpoint-4 is of another model .*{named}"):
            loaded(changes, *without)


def test_deepspeeds_programs_are_added_whole():
    texts = scripts_of_deepspeed()
    assert texts.keys() == {"zero_to_fp32.py", "zero_to_torch.py"}
    assert all("def " in text for text in texts.values())


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

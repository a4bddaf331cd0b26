import torch

from cpt.checkpoints.indexed_cpu import know_indexed_cpu


def test_a_state_is_restored_to_a_cpu_with_a_number(tmp_path):
    state = {"moment": torch.rand(5)}
    torch.save(state, tmp_path / "optimizer.pt")
    know_indexed_cpu()
    found = torch.load(tmp_path / "optimizer.pt", map_location=torch.device("cpu:0"), weights_only=True)
    assert torch.equal(found["moment"], state["moment"]) and found["moment"].device == torch.device("cpu")

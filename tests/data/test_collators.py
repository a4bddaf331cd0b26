import torch

from cpt.data.collators import stack_rows


def test_rows_are_stacked_by_name():
    batch = stack_rows([{"input_ids": torch.tensor([1, 2])}, {"input_ids": torch.tensor([3, 4])}])
    assert batch["input_ids"].tolist() == [[1, 2], [3, 4]]

import torch

from benchmarks.data.peers.clock import LENGTH, Job, cold, read_job, warm, waste, with_labels

END, PAD = 2, 0


class Tokenizer:
    eos_token_id, pad_token_id = END, PAD


class CountingJob(Job):
    def load_tokenizer(self):
        return Tokenizer()


def job(tmp_path):
    return CountingJob(tmp_path, tmp_path, tmp_path, tmp_path, 2)


def rows(*rows_of_ids):
    batch = torch.full((len(rows_of_ids), LENGTH), PAD)
    for row, ids in zip(batch, rows_of_ids, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    return {"input_ids": batch}


def test_padding_and_pieces_are_counted(tmp_path):
    measured = waste(lambda _: [rows([5, 6, END, 7, END], [8] * LENGTH)], job(tmp_path))
    assert measured == {"rows": 2, "tokens": 5 + LENGTH, "padding": 1 - (5 + LENGTH) / (2 * LENGTH), "pieces": 3}


def test_rows_laid_end_to_end_tell_their_pieces_by_positions(tmp_path):
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    measured = waste(
        lambda _: [{"input_ids": torch.tensor([[5, 6, END, 7, END, 8]]), "position_ids": positions}], job(tmp_path)
    )
    assert (measured["rows"], measured["tokens"], measured["pieces"]) == (1, 6, 3)


def test_a_last_batch_of_one_row_is_a_row(tmp_path):
    measured = waste(lambda _: [rows([8] * LENGTH, [8] * LENGTH), rows([5, END])["input_ids"]], job(tmp_path))
    assert (measured["rows"], measured["tokens"], measured["pieces"]) == (3, 2 * LENGTH + 2, 3)


def test_a_cold_start_goes_to_the_last_batch(tmp_path):
    measured = cold(lambda _: iter([rows([5])] * 3), job(tmp_path))
    assert measured["batches"] == 3
    assert measured["positions"] == 3 * LENGTH
    assert 0 < measured["first_batch_seconds"] <= measured["total_seconds"]


def test_a_warm_start_does_not_count_the_first_batch_in_its_speed(tmp_path):
    assert warm(lambda _: iter([rows([5])]), job(tmp_path))["steady_tokens_per_second"] == 0


def test_a_job_survives_its_command_line(tmp_path):
    asked = Job(tmp_path / "c.jsonl", tmp_path, tmp_path, tmp_path, 4, "torch")
    assert read_job(asked.as_json()) == asked


def test_labels_are_a_tensor_of_their_own():
    (batch,) = with_labels([rows([5])])
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert batch["labels"].data_ptr() != batch["input_ids"].data_ptr()

"""cpt's data layer as a program like its peers': `python -m benchmarks.data.ours ACTION JOB`, on the same clock.

Training begins when the first chunk is tokenised; variant `whole` tokenises everything before, as `cpt prepare` does.
"""

from collections.abc import Iterator

from benchmarks.data.peers.clock import BATCH, LENGTH, Job, run_program
from cpt.data.rows.build import PreparedData, build_data
from cpt.data.rows.loader import CPTDataLoader
from cpt.data.rows.mixture import ENDLESS
from cpt.data.rows.packing import Row
from cpt.recipe.schema import Data, Source


def batches(job: Job) -> Iterator[Row]:
    """One time through the corpus, with the tokens kept in the job's folder and the next chunks made ahead, as the
    Trainer does it."""
    prepared = prepare(job)
    ahead = prepared.read_ahead(0)
    if ahead is None:
        yield from one_epoch(prepared)
        return
    ahead.start()
    try:
        yield from one_epoch(prepared)
    finally:
        ahead.stop()


def prepare(job: Job) -> PreparedData:
    """What `build_data` gives for one source of weight 1."""
    data = Data(sequence_length=LENGTH, sources=[Source(path=str(job.corpus))])
    return build_data(
        data, job.load_tokenizer(), seed=0, cache_dir=job.folder, whole=job.variant == "whole"
    )


def one_epoch(prepared: PreparedData) -> Iterator[Row]:
    """The batches up to where the only source begins anew, the last one shorter; how many they are need not be known
    beforehand."""

    def is_first_time(row: int) -> bool:
        _, _, epoch = prepared.rows.row_at(row)
        return not epoch

    for number, batch in enumerate(
        CPTDataLoader(prepared.rows, micro_batch=BATCH, rows_in_all=ENDLESS)
    ):
        if is_first_time((number + 1) * BATCH - 1):
            yield batch
            continue
        rest = sum(is_first_time(number * BATCH + row) for row in range(BATCH))
        if rest:
            yield {name: values[:rest] for name, values in batch.items()}
        return


if __name__ == "__main__":
    run_program(batches)

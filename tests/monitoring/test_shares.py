import time

import pytest
from transformers import TrainerControl, TrainerState

from cpt.data.build import build_data
from cpt.data.mixture import RowsOfSteps
from cpt.data.rows.rows import IGNORED
from cpt.monitoring.shares import RealisedShares
from cpt.recipe.schema import Data, Model, Phase, Tokenizer
from cpt.tokenizer.load import load_tokenizer


@pytest.fixture
def build(corpus, tokenizer_folder):
    tokenizer = load_tokenizer(Tokenizer(path=str(tokenizer_folder)), Model(from_scratch=True))

    def run(*names, **options):
        sources = [{"path": str(corpus / f"{name}.jsonl")} for name in names]
        return build_data(Data(sources=sources, **{"sequence_length": 64, **options}), tokenizer, seed=1)

    return run


def counted(data, rows):
    """Tokens by source, looked up row by row; a document's first token has no label, padding has a beginning of its
    own."""
    tokens = dict.fromkeys([report.name for report in data.sources], 0)
    for number in range(rows):
        row = data.rows[number]
        beginnings, is_padded = int((row["position_ids"] == 0).sum()), bool(row["labels"][-1] == IGNORED)
        tokens[data.sources[data.rows.source_of(number)].name] += (
            int((row["labels"] != IGNORED).sum()) + beginnings - is_padded
        )
    return tokens


def test_the_logged_shares_are_those_of_the_tokens_that_were_read(build):
    data = build(
        "domain",
        "general",
        packing="none",
        phases=[Phase(until=64 * 100, weights={"domain": 1}), Phase(weights={"general": 3, "domain": 1})],
    )
    logs = {"loss": 1.0}
    RealisedShares(data, RowsOfSteps(4)).on_log(None, TrainerState(global_step=250), TrainerControl(), logs=logs)
    tokens = counted(data, 1000)
    for name, number in tokens.items():
        assert logs[f"share_{name}"] == pytest.approx(number / sum(tokens.values()), abs=0.01)
        assert logs[f"tokens_{name}"] == pytest.approx(number, rel=0.03)


def test_counting_takes_no_time_wherever_the_run_stands(build):
    data = build("domain", "general")
    started = time.perf_counter()
    for _ in range(1000):
        data.shares(10**11)
    assert (time.perf_counter() - started) / 1000 < 0.001


def test_other_logs_and_single_sources_stay_as_they_are(build):
    for data, logs in ((build("domain", "general"), {"eval_loss": 1.0}), (build("domain"), {"loss": 1.0})):
        before = dict(logs)
        RealisedShares(data, RowsOfSteps(4)).on_log(None, TrainerState(global_step=2), TrainerControl(), logs=logs)
        assert logs == before

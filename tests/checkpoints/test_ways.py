import pytest

from cpt.checkpoints.manifest import FileEntry, Manifest
from cpt.checkpoints.ways import in_words, is_zero, way_of

COMMON = {
    "format": 1,
    "kind": "full",
    "step": 1,
    "rows": 1,
    "tokens": 1,
    "world_size": 2,
    "exactness": "",
    "recipe": "",
    "data": "",
}


@pytest.mark.parametrize(
    ("stage", "files", "way", "words"),
    [
        (None, ["optimizer.pt"], "plain", "no sharding"),
        (None, ["fsdp/part_0_of_2.pt"], "fsdp", "FSDP2"),
        (3, ["latest"], "zero-3", "ZeRO-3"),
        (0, ["latest"], "zero-0", "ZeRO-0"),
    ],
)
def test_a_manifest_tells_how_the_model_was_shared(stage, files, way, words):
    manifest = Manifest(**COMMON, zero_stage=stage, versions={}, files=dict.fromkeys(files, FileEntry(1, "")))
    assert way_of(manifest) == way and words in in_words(way) and is_zero(way) == (stage is not None)

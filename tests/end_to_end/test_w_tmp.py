import json
import pytest, resuming, launching
from pathlib import Path

@pytest.mark.parametrize("stage", [1, 3, 2])
def test_x(tiny_recipe, tmp_path, monkeypatch, stage):
    tiny_recipe["training"] |= {"bf16": True, "per_device_train_batch_size": 1}
    plain = launching.zero_profile
    def with_fp32(folder, stage, *, offload=False):
        path = Path(plain(folder, stage, offload=offload))
        p = json.loads(path.read_text()); p["data_types"] = {"grad_accum_dtype": "fp32"}; path.write_text(json.dumps(p)); return str(path)
    monkeypatch.setattr(resuming, "zero_profile", with_fp32)
    resuming.interrupted_equals_straight(tiny_recipe, tmp_path, at=(3,), stage=stage, processes=2)

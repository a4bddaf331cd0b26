#!/usr/bin/env bash
# Collect the wheels that the GPU benchmark needs on a machine without a network, which has Python 3.12, torch 2.11, transformers and
# accelerate (an image of a cloud, say) but little else. Copy the folder there and install it beside the image's packages:
#
#   benchmarks/gpu/wheels.sh build/wheels
#   python3 -m pip install --no-index --no-deps --target /tmp/site build/wheels/*.whl && export PYTHONPATH=/tmp/site
#
# Run it in the environment of this project, which builds DeepSpeed. About 24 files, 24 MB. Wheels are never committed.
set -euo pipefail
folder=${1:?usage: wheels.sh FOLDER}
mkdir -p "$folder"

packages=(
    annotated-types array-record awkward awkward-cpp cloudpickle datasets dill gigatoken grain hjson liger-kernel multiprocess
    orjson peft portpicker pydantic pydantic-core rich trl typer typing-inspection bitsandbytes
)
platforms=()
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${platform}_x86_64")
done
# One at a time: pip downloads nothing of a list in which one package has no fitting wheel.
for package in "${packages[@]}"; do
    python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$folder" \
        --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" --platform any "$package" ||
        echo "no wheel for $package" >&2
done

# DeepSpeed is published as source. Its kernels are compiled when they are used.
DS_BUILD_OPS=0 python3 -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" deepspeed

# bitsandbytes has a library for each version of CUDA: keep the one for CUDA 13.0, 4 of 43 MB.
python3 - "$folder" <<'PYTHON'
import pathlib
import sys
import zipfile


def is_kept(name):
    return "libbitsandbytes" not in name or "cuda130" in name or "cpu" in name


for wheel in pathlib.Path(sys.argv[1]).glob("bitsandbytes-*.whl"):
    small = wheel.with_suffix(".small")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("/RECORD"):
                content = b"".join(line for line in content.splitlines(True) if is_kept(line.decode()))
            if is_kept(name):
                target.writestr(name, content)
    small.replace(wheel)
PYTHON
du -sh "$folder"

#!/usr/bin/env bash
# Collect the wheels that the GPU benchmark needs on a machine without a network, which has Python 3.12, torch 2.11, transformers and
# accelerate (an image of a cloud, say) but little else. Copy the folder there and install it beside the image's packages:
#
#   benchmarks/gpu/wheels.sh build/wheels
#   python3 -m pip install --no-index --no-deps --target /tmp/site build/wheels/*.whl && export PYTHONPATH=/tmp/site
#
# Run it in the environment of this project, which builds DeepSpeed. Wheels are never committed.
set -euo pipefail
folder=$(realpath -m "${1:?usage: wheels.sh FOLDER}")
mkdir -p "$folder"
cd "$(dirname "$0")/../.."
python3 -m benchmarks.gpu.carried
mapfile -t packages < <(python3 -m benchmarks.gpu.carried --download | grep --invert-match '^deepspeed')
deepspeed=$(python3 -m benchmarks.gpu.carried --download | grep '^deepspeed')

platforms=()
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${platform}_x86_64")
done
# One at a time: pip downloads nothing of a list in which one package has no fitting wheel. transformers comes in the
# newest version that pyproject.toml allows, although the image has an older one: users install it.
for package in "${packages[@]}"; do
    python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$folder" \
        --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" --platform any "$package" ||
        echo "no wheel for $package" >&2
done

# DeepSpeed is published as source. Its kernels are compiled when they are used.
DS_BUILD_OPS=0 python3 -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" "$deepspeed"

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
python3 -m benchmarks.gpu.carried "$folder"
megabytes=$(du --summarize --block-size=1M "$folder" | cut -f 1)
echo "$megabytes MB in $folder"
test "$megabytes" -le 64 || { echo "more than the 64 MB that can be copied" >&2; exit 1; }

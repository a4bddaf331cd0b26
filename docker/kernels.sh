#!/bin/sh
# Print pip's requirements for prebuilt kernels: sh docker/kernels.sh cu130 2.11.0 flash-attn mamba-ssm causal-conv1d
# flash-attn is from github.com/mjun0812/flash-attention-prebuild-wheels, the others from github.com/astral-sh-build
# (torch 2.11, Python 3.12).
set -eu
build=$1
torch=${2%.*}
shift 2
digits=${build#cu}
cuda=${digits%?}.${digits#??}
python=$(python3 -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
for kernel in "$@"; do
    case "$kernel $torch" in
        "flash-attn 2.11") release=v0.9.4 ;;
        "flash-attn 2.13") release=v0.9.47 ;;
        "mamba-ssm 2.11") version=2.3.2.post1 ;;
        "causal-conv1d 2.11") version=1.6.2.post1 ;;
        *)
            echo "no wheel of $kernel for torch $torch: see docs/howto/installing.md" >&2
            exit 2
            ;;
    esac
    if [ "$kernel" = flash-attn ]; then
        folder=https://github.com/mjun0812/flash-attention-prebuild-wheels/releases/download
        echo "flash-attn @ $folder/$release/flash_attn-2.8.3+${build}torch$torch-$python-$python-linux_x86_64.whl"
    else
        echo "--extra-index-url https://wheels.astral.sh/simple/$build/"
        echo "$kernel==$version+cu.$cuda.torch.$torch"
    fi
done

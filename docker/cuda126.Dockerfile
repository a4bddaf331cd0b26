# syntax=docker/dockerfile:1
# cpt with torch 2.11.0 for CUDA 12.6; written by `python -m docker.write` from docker/builds.py.
#   docker build --file docker/cuda126.Dockerfile --tag cpt:cuda126 .
#   docker run --rm --gpus all --shm-size=8g --volume "$PWD:/work" cpt:cuda126 doctor
FROM nvidia/cuda:12.6.3-devel-ubuntu24.04

# Triton compiles the GPU's kernels, DeepSpeed its optimizer: g++ (with gcc) and Python's headers. Of these packages the distribution keeps one version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git python3-dev python3-venv \
    && rm --recursive /var/lib/apt/lists/*

ENV PATH=/opt/cpt/bin:$PATH
RUN python3 -m venv /opt/cpt

# What seldom changes comes first: a new version of cpt costs the last layers only.
COPY docker/cuda126.txt /opt/requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --requirement /opt/requirements/cuda126.txt

# Not built by the projects themselves (docs/howto/installing.md): `--build-arg KERNELS=` leaves them out.
ARG KERNELS=yes
COPY docker/cuda126-kernels.txt /opt/requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ -n "$KERNELS" ]; then pip install --requirement /opt/requirements/cuda126-kernels.txt; fi

COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE /opt/source/
COPY cpt /opt/source/cpt
COPY recipes /opt/source/recipes
COPY deepspeed_configs /opt/source/deepspeed_configs
COPY launch /opt/source/launch
RUN pip install --no-cache-dir --no-deps /opt/source

RUN useradd --create-home --uid 1001 cpt && mkdir /work && chown cpt /work
USER 1001
WORKDIR /work
ENTRYPOINT ["cpt"]
CMD ["--help"]

# syntax=docker/dockerfile:1
# cpt with torch 2.13.0 for the CPU; written by `python -m docker.write` from docker/builds.py.
#   docker build --file docker/cpu.Dockerfile --tag cpt:cpu .
#   docker run --rm --shm-size=8g --volume "$PWD:/work" cpt:cpu doctor
FROM python:3.11-slim-bookworm

# DeepSpeed compiles its communication and its optimizer at their first use: g++. Of these packages the distribution keeps one version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm --recursive /var/lib/apt/lists/*

ENV PATH=/opt/cpt/bin:$PATH
RUN python3 -m venv /opt/cpt

# What seldom changes comes first: a new version of cpt costs the last layers only.
COPY docker/cpu.txt /opt/requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --requirement /opt/requirements/cpu.txt

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

# treepack with CUDA, for one machine or a job of a cluster:
#
#     docker build --tag treepack .
#     docker run --gpus all --volume "$PWD:/data" treepack train /data/packed --model Qwen/Qwen3-0.6B --out /data/trained
#
# The devel image has the compiler and the headers that triton and torch.compile need at run time.
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    PATH=/opt/venv/bin:$PATH

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3.12 -m venv /opt/venv

WORKDIR /opt/treepack
COPY constraints.txt pyproject.toml README.md LICENSE MANIFEST.in ./
COPY treepack treepack
COPY cli cli
COPY schemas schemas
COPY sample_data sample_data

RUN python -m pip install torch==2.13.0 \
    && python -m pip install --constraint constraints.txt '.[train,report,lora,rollout,s3,gcs]'

# The image is broken if a command cannot start or the data half cannot run.
RUN treepack --version \
    && treepack prepare sample_data/chat.jsonl --tokenizer sample_data/tokenizer --capacity 4096 --out /tmp/data \
    && treepack stats /tmp/data/packed --check \
    && rm -rf /tmp/data

RUN useradd --create-home --uid 10001 treepack
USER 10001
WORKDIR /data

ENTRYPOINT ["treepack"]
CMD ["--help"]

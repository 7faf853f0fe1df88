# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
#
# docker build -t vllm-glm-dsa .                          for NVIDIA GPUs
# docker build -t vllm-glm-dsa --build-arg DEVICE=cpu .   for a plain CPU
# docker run --gpus all -p 8000:8000 -v /models:/models:ro vllm-glm-dsa /models/FILE.gguf
ARG DEVICE=cuda
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04

FROM ${PYTHON_IMAGE} AS wheel
ARG DEVICE
# The build number in the version is counted from the clone's history.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN VLLM_TARGET_DEVICE=${DEVICE} \
    pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

# torch's wheels bring the CUDA libraries. Triton builds its launchers with a C compiler
# and Python's headers.
FROM ${CUDA_IMAGE} AS runtime-cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        gcc libc6-dev libnuma1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM ${PYTHON_IMAGE} AS runtime-cpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM runtime-${DEVICE} AS runtime
ARG DEVICE
COPY requirements/${DEVICE}.txt /tmp/constraints.txt
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    python3 -m venv /opt/vllm \
    && /opt/vllm/bin/pip install --no-cache-dir -c /tmp/constraints.txt /dist/*.whl \
    && useradd --create-home --uid 10001 vllm
ENV PATH=/opt/vllm/bin:$PATH \
    HF_HUB_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1
USER 10001
WORKDIR /home/vllm
EXPOSE 8000
# Loading hundreds of GB takes a while; until then no answer is not a failure.
HEALTHCHECK --start-period=30m --interval=30s --timeout=5s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm", "serve"]

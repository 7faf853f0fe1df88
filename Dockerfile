# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
#
# docker build -t vllm-glm-dsa .                          for NVIDIA GPUs
# docker build -t vllm-glm-dsa --build-arg DEVICE=cpu .   for a plain CPU
# docker run --gpus all -p 8000:8000 -v /models:/models:ro vllm-glm-dsa /models/FILE.gguf
ARG DEVICE=cuda
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04
ARG CUDA_DEVEL_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04

# hadolint ignore=DL3006
FROM ${CUDA_DEVEL_IMAGE} AS toolkit

FROM ${PYTHON_IMAGE} AS build-cpu
# The build number in the version is counted from the clone's history.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/*

# The kernels are compiled with GCC 12 of Debian, whose symbols older systems have too.
# Of torch only headers are needed; the CPU's is the smallest.
FROM build-cpu AS build-cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends cmake g++ ninja-build \
    && rm -rf /var/lib/apt/lists/*
COPY --from=toolkit /usr/local/cuda-13.0 /usr/local/cuda
ENV CUDA_HOME=/usr/local/cuda \
    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    VLLM_GLM_DSA_EXTENSION=1

# hadolint ignore=DL3006
FROM build-${DEVICE} AS wheel
ARG DEVICE
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

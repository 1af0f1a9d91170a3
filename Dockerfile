# syntax=docker/dockerfile:1
#
# Headrace and Ray in one Python environment, for the chart and for plain containers. Two targets:
#
#   docker build --target cpu --build-arg TORCH_INDEX=<PyTorch's index of CPU wheels> --tag headrace:0.1.0-cpu .
#   docker build --target cuda --tag headrace:0.1.0 .
#
# docs/kubernetes.md tells the rest: the bill of materials, and what was tried of this file.
# Every package is pinned in docker/requirements.txt; torch, whose builds differ, and what builds the wheel are pinned here.

ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG TORCH_VERSION=2.13.0
ARG SETUPTOOLS_VERSION=84.2.1

# The wheel of this repository.
FROM ${PYTHON_IMAGE} AS wheel
ARG SETUPTOOLS_VERSION
RUN pip install --no-cache-dir "setuptools==${SETUPTOOLS_VERSION}"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY services services
COPY cluster cluster
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

# An environment with all that Headrace needs but torch. It is made where it will lie: its scripts name their Python.
FROM ${PYTHON_IMAGE} AS packages
COPY docker/requirements.txt /requirements.txt
RUN python -m venv /opt/headrace && /opt/headrace/bin/pip install --no-cache-dir --no-deps --requirement /requirements.txt

FROM packages AS packages-cpu
ARG TORCH_VERSION
# Index of wheels of torch without CUDA. Empty: the usual wheels, which bring CUDA's libraries along.
ARG TORCH_INDEX=""
RUN /opt/headrace/bin/pip install --no-cache-dir --constraint /requirements.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==${TORCH_VERSION}"
COPY --from=wheel /wheels /wheels
RUN /opt/headrace/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl && /opt/headrace/bin/pip check

FROM packages AS packages-cuda
ARG TORCH_VERSION
# The usual wheels of torch bring CUDA's libraries along; the driver comes from the host.
RUN /opt/headrace/bin/pip install --no-cache-dir --constraint /requirements.txt "torch==${TORCH_VERSION}"
COPY --from=wheel /wheels /wheels
RUN /opt/headrace/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl && /opt/headrace/bin/pip check

# What both targets share. Nothing in it may be written by the user that it runs as but its home, /tmp and /dev/shm.
FROM ${PYTHON_IMAGE} AS runtime
RUN groupadd --gid 1000 headrace && useradd --uid 1000 --gid 1000 --create-home --shell /usr/sbin/nologin headrace
# Ray's and the kubelet's commands may come by a login shell, which sets a PATH of its own.
RUN printf 'PATH=/opt/headrace/bin:$PATH\n' > /etc/profile.d/headrace.sh
ENV PATH=/opt/headrace/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/home/headrace \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    RAY_USAGE_STATS_ENABLED=0
COPY LICENSE /usr/share/doc/headrace/LICENSE
COPY --chmod=0555 docker/healthcheck.py /usr/local/bin/headrace-healthcheck
ARG VERSION=0.1.0
ARG REVISION=""
LABEL org.opencontainers.image.title="headrace" \
      org.opencontainers.image.description="A distributed prefix cache for LLM inference" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
WORKDIR /home/headrace
# 8000 HTTP and 9000 gRPC of gateways. Ray's own ports and those of store nodes are for the inside of a network.
EXPOSE 8000 9000
HEALTHCHECK --interval=10s --timeout=6s --start-period=120s --retries=6 CMD ["headrace-healthcheck"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["headrace"]
CMD ["--help"]

FROM runtime AS cpu
COPY --from=packages-cpu /opt/headrace /opt/headrace
USER 1000:1000

FROM runtime AS cuda
# torch compiles its kernels of attention when a worker starts, by Triton, which calls a C compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=packages-cuda /opt/headrace /opt/headrace
# Where the compiled kernels lie: not below a name that only a known user has.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TORCHINDUCTOR_CACHE_DIR=/home/headrace/.cache/torchinductor \
    TRITON_CACHE_DIR=/home/headrace/.cache/triton
USER 1000:1000

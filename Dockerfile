# vserve with all it needs at run time, for any Debian-like base with Python 3.11 or newer:
#   docker build -t vserve .
#   docker run --gpus all --stop-timeout 40 -p 8000:8000 -v vserve:/home/vserve/.cache vserve Qwen/Qwen3-0.6B
# The volume keeps what was downloaded and what was compiled; --stop-timeout is longer than --shutdown-timeout.
# torch comes with CUDA's libraries; for the CPU alone (a tenth of the size):
#   docker build -t vserve --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .
# With other extras of pyproject.toml than traces and events of the cache: --build-arg EXTRAS=otel,ray; none: EXTRAS=
ARG BASE_IMAGE=debian:bookworm-slim

# ---- the packages that vserve needs: a layer that changes only with their versions ----
FROM ${BASE_IMAGE} AS packages
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      ca-certificates python3 python3-dev python3-pip python3-venv \
 && rm -rf /var/lib/apt/lists/*
# pip reads these; nothing of them is left in the image.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
ARG EXTRAS=otel,kv-events
WORKDIR /source
COPY pyproject.toml constraints.txt ./
RUN python3 -m venv --without-pip /opt/vserve \
 && python3 -c "import sys, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
      print(*p['dependencies'], *(d for e in sys.argv[1].replace(',', ' ').split() for d in p['optional-dependencies'][e]), sep='\n')" \
      "$EXTRAS" > requirements.txt \
 && pip --python /opt/vserve/bin/python install --no-cache-dir --constraint constraints.txt --requirement requirements.txt
# What only compiling against these packages, or testing them, needs.
RUN cd /opt/vserve/lib/python3*/site-packages \
 && rm -rf torch/include torch/test torch/share/cmake triton/backends/amd/lib \
 && find . -type d \( -name tests -o -name test \) -path '*/*/*' -prune -exec rm -rf {} + \
 && mkdir /headers && cd / && cp -a --parents usr/include/python3* usr/include/*/python3* /headers/

# ---- vserve itself ----
FROM packages AS build
COPY . .
# Built with the setuptools that came with torch: this stage downloads nothing.
RUN pip --python /opt/vserve/bin/python install --no-cache-dir --no-deps --no-build-isolation --root /built .

FROM ${BASE_IMAGE}
# Triton compiles its driver module at first use: with a C compiler, and Python's headers from above.
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home vserve \
 && install -d -m 1777 /home/vserve/.cache /home/vserve/.cache/huggingface /home/vserve/.cache/vserve
COPY --from=packages /headers/ /
COPY --from=packages /opt/vserve /opt/vserve
COPY --from=build /built/ /
# HOME too: with --user, whoever it is finds the caches.
ENV PATH=/opt/vserve/bin:$PATH \
    HOME=/home/vserve \
    HF_HOME=/home/vserve/.cache/huggingface \
    VSERVE_CACHE=/home/vserve/.cache/vserve \
    CUDA_CACHE_PATH=/home/vserve/.cache/vserve/cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER vserve
WORKDIR /home/vserve
VOLUME /home/vserve/.cache
EXPOSE 8000
# `make image` gives them their values.
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
ARG SOURCE
LABEL org.opencontainers.image.title="vserve" \
      org.opencontainers.image.description="A small, fast LLM inference server that speaks the OpenAI API" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}"
# It finds port, socket and TLS by itself. Loading may take long: failures do not count for the first half hour, and the
# first success ends it.
HEALTHCHECK --interval=10s --timeout=6s --start-period=30m --retries=3 \
  CMD ["vserve", "doctor", "--health"]
ENTRYPOINT ["vserve"]

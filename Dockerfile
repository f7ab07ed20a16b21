# One image for all three processes; the command says which.
FROM python:3.11.14-slim-bookworm AS build
ARG TORCH_REQUIREMENT=torch==2.13.0
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/breakeven
COPY requirements.lock requirements-model.lock /src/
RUN /opt/breakeven/bin/pip install "${TORCH_REQUIREMENT}" \
 && /opt/breakeven/bin/pip install --no-deps --require-hashes -r /src/requirements.lock \
 && /opt/breakeven/bin/pip install --no-deps --require-hashes -r /src/requirements-model.lock
COPY . /src
RUN /opt/breakeven/bin/pip install --no-deps --no-build-isolation /src

FROM python:3.11.14-slim-bookworm
# The row-invariant kernels are compiled for the machine they run on, at first start.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home breakeven \
 && install -d -o 10001 -g 10001 /var/cache/breakeven /run/breakeven
COPY --from=build /opt/breakeven /opt/breakeven
ENV PATH=/opt/breakeven/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 8000
CMD ["breakeven", "serve"]

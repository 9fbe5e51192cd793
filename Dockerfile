# One image for CPUs and for NVIDIA GPUs; what differs is the build of torch. Linted, not built yet: please report.
#
#   docker build -t sa2va-rl .
#   docker build -t sa2va-rl:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#
# All that is written goes into /data, the working folder: mount a folder of yours there, and run as yourself.
#
#   mkdir -p work
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/work:/data" sa2va-rl prompts quick
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/work:/data" --gpus all --shm-size 8g sa2va-rl:cuda doctor
#
# The shell files are there, too; their OUTPUT_DIR is /data/outputs:
#
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/work:/data" --entrypoint bash sa2va-rl \
#     /opt/sa2va-rl/run_step2_finetune.sh quick
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
WORKDIR /source
COPY pyproject.toml requirements.txt README.md LICENSE ./
COPY rl_reward_network rl_reward_network
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
# No system packages: of shared libraries the wheels need libc, libgcc, libstdc++ and zlib, which the base image has.
# Torch comes first and alone, so that TORCH_INDEX decides on its build and on nothing else.
WORKDIR /opt/sa2va-rl
COPY requirements.txt ./
RUN python -m venv "$VIRTUAL_ENV" \
    && grep '^torch==' requirements.txt > torch.txt \
    && python -m pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX" -r torch.txt \
    && python -m pip install --no-cache-dir -r requirements.txt \
    && rm torch.txt
COPY --from=build /wheels /wheels
RUN python -m pip install --no-cache-dir --no-deps /wheels/*.whl
COPY pyproject.toml run_*.sh ./
COPY scripts scripts

# HOME keeps caches, such as models given by their Hub id, in the mount. Libraries ask for USER where --user names a
# number that the image does not know.
RUN install --directory --owner 1000 --group 1000 /data
ENV HOME=/data \
    USER=sa2va \
    OUTPUT_DIR=/data/outputs
WORKDIR /data
USER 1000:1000
ENTRYPOINT ["sa2va-rl"]

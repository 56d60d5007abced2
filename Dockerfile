# For NVIDIA GPUs: docker build -t tandem . (docs/clusters.md#containers). Another CUDA or PyTorch (2.10 or later):
# --build-arg BASE=pytorch/pytorch:TAG
ARG BASE=pytorch/pytorch:2.12.1-cuda12.6-cudnn9-runtime
FROM ${BASE}

# --compile needs a compiler and Python's headers. PIP_BREAK_SYSTEM_PACKAGES lets pip install beside the packages of the
# system, among which newer images have PyTorch.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PYTHONUNBUFFERED=1
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev && rm -rf /var/lib/apt/lists/*

ARG EXTRAS=all
WORKDIR /tandem
COPY . .
# With the constraint, or a torchvision that an extra needs would bring another PyTorch.
RUN python -c "import torch; print(f'torch=={torch.__version__}')" > /tmp/torch.txt && \
    pip install --no-cache-dir --constraint /tmp/torch.txt --editable ".[${EXTRAS}]"

# Whose files a run writes into a mounted folder: --build-arg UID=$(id -u)
ARG UID=1001
RUN useradd --no-log-init --create-home --non-unique --uid "${UID}" tandem && mkdir runs && chown tandem runs
USER ${UID}

CMD ["python", "train_vae.py"]

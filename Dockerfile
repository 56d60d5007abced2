# For NVIDIA GPUs. No image has been built from this file yet; hadolint passes.
#
#     docker build -t tandem .
#     docker run --rm --gpus all --ipc=host -v "$PWD/photos:/photos:ro" -v "$PWD/runs:/work/runs" tandem \
#         torchrun --nproc_per_node 8 train_vae.py --image_folder /photos
#
# --ipc=host (or --shm-size 8g): Docker's /dev/shm of 64 MB is too small for NCCL. The loader processes work with it.
# The user has the number 10001, which must be able to write the folder that is mounted at /work/runs.
# Its tag could not be looked up where this was written: hub.docker.com/r/pytorch/pytorch/tags. 2.10 or later.
FROM pytorch/pytorch:2.10.0-cuda12.8-cudnn9-runtime

ARG EXTRAS=deepspeed,video,report
RUN useradd --create-home --uid 10001 tandem \
    && mkdir -p /work/runs && chown -R tandem /work
WORKDIR /work
COPY --chown=tandem . .
# Ubuntu's Python takes packages only if it is told to.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
# PyTorch of the base image satisfies pyproject.toml, and stays.
RUN pip install --no-cache-dir --editable ".[${EXTRAS}]"
USER 10001
CMD ["python", "train_vae.py"]

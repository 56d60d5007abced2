"""The four leaves install as tandem.models, tandem.data, tandem.distributed and tandem.training: a top-level package
called ``distributed`` would break dask. tandem.files, which the leaves import, has that name in a checkout too."""

from __future__ import annotations

from setuptools import find_packages, setup

LEAVES = ("models", "data", "distributed", "training")
PACKAGES = [name for leaf in LEAVES for name in (leaf, *(f"{leaf}.{sub}" for sub in find_packages(leaf)))]

EXTRAS = {
    "deepspeed": ["deepspeed>=0.19.8,<0.20"],  # its inside is used
    "wandb": ["wandb>=0.31"],
    "tensorboard": ["tensorboard>=2.18"],
    "fid": ["torch-fidelity>=0.4"],
    "audio": ["soundfile>=0.13", "soxr>=1.0", "open_clip_torch>=3.0,<4", "tokenizers>=0.21"],
    "video": ["av>=17"],
    "clip": ["open_clip_torch>=3.0,<4"],
    "lion": ["lion-pytorch>=0.2.5"],
    "test": [
        "pytest>=8",
        "pytest-timeout",
        "pytest-xdist",
        "setuptools>=77",
        "psutil",
        "scipy",
        "scikit-image",
        "torchvision",
        "vector-quantize-pytorch>=1.32",
        "lpips>=0.1.4",
        "torch-fidelity>=0.4",
        "librosa>=0.11",
        "webdataset>=1.0",
        "ruff>=0.14",
        "mypy>=1.18",
        "types-PyYAML",
        "types-tqdm",
        "types-psutil",
    ],
}
EXTRAS["test"] += EXTRAS["audio"] + EXTRAS["video"] + EXTRAS["clip"] + EXTRAS["lion"]
ALL = ("deepspeed", "wandb", "tensorboard", "audio", "video", "clip", "lion")
EXTRAS["all"] = [needed for extra in ALL for needed in EXTRAS[extra]]

setup(
    name="tandem-training",
    version="0.1.0",
    description="Training scripts for the parts of generative models, with the same numbers on every backend",
    license="MIT",
    python_requires=">=3.10",
    packages=["tandem.files", *(f"tandem.{name}" for name in PACKAGES)],
    package_dir={
        "tandem.files": "tandem/files",
        **{f"tandem.{name}": name.replace(".", "/") for name in PACKAGES},
    },
    install_requires=[
        "torch>=2.10",
        "numpy>=1.26",
        "pillow>=11",
        "PyYAML>=6",
        "safetensors>=0.8",
        "tqdm>=4.66",
        "einops>=0.8",
    ],
    extras_require=EXTRAS,
)

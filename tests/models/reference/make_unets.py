"""Makes unets.npz, with DALLE2-pytorch 1.15.6 in place of this repository's Unet. From the repository's root:

pip install --no-deps dalle2-pytorch==1.15.6 resize-right kornia kornia_rs rotary-embedding-torch x-clip \
    coca-pytorch pytorch-warmup ema-pytorch accelerate
python -m tests.models.reference.make_unets
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from dalle2_pytorch import Decoder, Unet

from tests.models.reference.unets import (
    CASES,
    FILE,
    LONG_STRIDE,
    PUBLISHED,
    STRIDE,
    TIMESTEPS,
    inputs_of,
    public_config,
    published_config,
    weights_of,
)  # fmt: skip

PUBLIC_NAMES = {"lowres_image": "lowres_cond_img", "lowres_time": "lowres_noise_level"}


def main() -> None:
    torch.set_num_threads(1)
    arrays: dict[str, Any] = {}
    shapes: dict[str, Any] = {}
    for case in CASES:
        config = public_config(case)
        decoder = Decoder([Unet(**unet) for unet in config.pop("unets")], **config).eval()
        unet = decoder.unets[-1]
        shapes[case] = {name: list(weight.shape) for name, weight in unet.state_dict().items()}
        unet.load_state_dict(weights_of(case, shapes[case]))
        inputs = {PUBLIC_NAMES.get(name, name): tensor for name, tensor in inputs_of(case).items()}
        inputs.setdefault("image_embed", None)
        with torch.no_grad():
            arrays[f"{case}/kept"] = unet(**inputs).numpy()
            null = unet(**inputs, image_cond_drop_prob=1.0, text_cond_drop_prob=1.0)
            arrays[f"{case}/null"] = null[:, :, ::STRIDE, ::STRIDE].numpy()
        if case == "lowres":
            state = decoder.state_dict()
            shapes["decoder"] = {name: list(tensor.shape) for name, tensor in state.items()}
            others = {name: tensor for name, tensor in state.items() if not name.startswith("unets.")}
            arrays |= {name: (x if len(x) == TIMESTEPS else x[::LONG_STRIDE]).numpy() for name, x in others.items()}
    for name in PUBLISHED:
        config = published_config(name)
        decoder = Decoder([Unet(**unet) for unet in config.pop("unets")], **config)
        shapes[name] = {weight: list(tensor.shape) for weight, tensor in decoder.state_dict().items()}
    arrays["shapes"] = np.frombuffer(json.dumps(shapes).encode(), dtype=np.uint8)
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()

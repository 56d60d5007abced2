"""Makes tokenizers.npz, with DALLE-pytorch 1.1.4 and muse-maskgit-pytorch 0.3.5 in place of this repository's models.
From the repository's root:

pip install --no-deps dalle-pytorch==1.1.4 muse-maskgit-pytorch==0.3.5 vector-quantize-pytorch==1.11.8 accelerate \
    beartype ema-pytorch memory-efficient-attention-pytorch sentencepiece "transformers<5" "tokenizers<0.23" \
    "huggingface_hub<1" regex psutil hf-xet
python -m tests.models.reference.make_tokenizers
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.models.reference.absent import unused
from tests.models.reference.tokenizers import FILE, VAE, VQGAN, images, state_of

# Modules that DALLE-pytorch imports for other models than its discrete VAE.
OTHERS = (
    "axial_positional_embedding", "g_mlp_pytorch", "omegaconf", "rotary_embedding_torch", "taming",
    "taming.models", "taming.models.vqgan",
)  # fmt: skip


def weights_into(model: nn.Module, case: str) -> dict[str, list[int]]:
    """Give a public model the weights of a case; returns the shapes of its state dict."""
    shapes = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    model.load_state_dict(state_of(case, shapes))
    return shapes


def main() -> None:
    unused(OTHERS)
    from dalle_pytorch.dalle_pytorch import DiscreteVAE
    from muse_maskgit_pytorch import VQGanVAE

    torch.set_num_threads(1)
    vae, vqgan = DiscreteVAE(**VAE).eval(), VQGanVAE(**VQGAN).eval()
    shapes = {"vae": weights_into(vae, "vae"), "vqgan": weights_into(vqgan, "vqgan")}
    outputs: dict[str, Tensor] = {}
    with torch.no_grad():
        outputs["vae/codes"] = vae.get_codebook_indices(images("vae"))
        outputs["vae/reconstruction"] = vae.decode(outputs["vae/codes"])  # normalised by mean 0.5 and deviation 0.5
        _, outputs["vqgan/codes"], _ = vqgan.encode(images("vqgan"))
        outputs["vqgan/reconstruction"] = vqgan.decode_from_ids(outputs["vqgan/codes"])
        torch.testing.assert_close(vqgan(images("vqgan")), outputs["vqgan/reconstruction"])
        outputs["vqgan/logits"] = vqgan.discr(images("vqgan"))
    arrays: dict[str, Any] = {name: output.numpy() for name, output in outputs.items()}
    for case, of_case in shapes.items():
        arrays[f"{case}/shapes"] = np.frombuffer(json.dumps(of_case).encode(), dtype=np.uint8)
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()

"""Makes autoencoders.npz, with diffusers 0.42.1, taming-transformers-rom1504 0.0.6, and checkouts of LlamaGen
(ce98ec4), latent-diffusion (a506df5) and SEED-Voken (b9a17ea, IBQ) in place of this repository's models, and shows that
they load our files strictly and compute the same of them. From the repository's root:

pip install --no-deps diffusers==0.42.1 lazy-importer importlib_metadata zipp taming-transformers-rom1504==0.0.6
python -m tests.models.reference.make_autoencoders LLAMAGEN LATENT_DIFFUSION SEED_VOKEN
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tandem.weights.formats.detection import detect_format
from tests.models.reference.absent import unused
from tests.models.reference.autoencoders import CASES, DIFFUSERS, FILE, images, written
from tests.models.reference.unets import weights_of

# What the packages import for training.
OTHERS = ("pytorch_lightning", "lightning", "main", "taming.main")
IDENTITY = {"lossconfig": {"target": "torch.nn.Identity", "params": {}}}
CLASSES = {
    "AutoencoderKL": "diffusers AutoencoderKL", "VQModel": "diffusers VQModel", "taming": "taming.models.vqgan VQModel",
    "latent-diffusion": "ldm.models.autoencoder AutoencoderKL", "IBQ": "src.IBQ.models.ibqgan IBQ",
    "LlamaGen": "tokenizer.tokenizer_image.vq_model VQModel",
}  # fmt: skip


def made(case: str) -> Any:
    """The public model of a case, in eval mode."""
    package, arguments, _ = CASES[case]
    module, name = CLASSES[package].split()
    kind = getattr(importlib.import_module(module), name)
    if package == "LlamaGen":
        return kind(importlib.import_module(module).ModelArgs(**arguments)).eval()
    return kind(**arguments, **({} if module == "diffusers" else IDENTITY)).eval()


def outputs(case: str, model: Any) -> dict[str, Tensor]:
    """Codes or latents, and the reconstruction."""
    inputs = 2 * images(case) - 1
    if CASES[case].ours["quantizer"] == "kl":
        latents = model.encode(inputs).mode()
        return {"latents": latents, "reconstruction": model.decode(latents)}
    quantized, _, (_, _, codes) = model.encode(inputs)
    assert len(codes.unique()) > 3, codes
    return {"codes": codes.view(2, *quantized.shape[2:]), "reconstruction": model.decode(quantized)}


def main() -> None:
    unused(OTHERS)
    for name in ("main", "taming.main"):
        sys.modules[name].instantiate_from_config = lambda config: nn.Identity()  # type: ignore[attr-defined]
    sys.path += sys.argv[1:]
    torch.set_num_threads(1)
    arrays: dict[str, Any] = {}
    for case, (package, _, _) in CASES.items():
        model = made(case)
        said = {"shapes": {name: list(weight.shape) for name, weight in model.state_dict().items()}}
        if package in DIFFUSERS:
            said["config"] = json.loads(model.to_json_string())
        else:
            model.load_state_dict(weights_of(case, said["shapes"]))
            if package == "IBQ":
                model.model_ema.copy_to(model)
            with torch.no_grad():
                given = outputs(case, model)
            arrays |= {f"{case}/{name}": output.numpy() for name, output in given.items()}
        arrays |= {f"{case}/{name}": np.frombuffer(json.dumps(each).encode(), np.uint8) for name, each in said.items()}
    np.savez_compressed(FILE, **arrays)

    for case in (case for case in CASES if CASES[case].package not in DIFFUSERS):
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            path = written(case, Path(folder))
            public = detect_format(path)
            back = Path(folder) / "back"
            public.save(public.load(path, "best"), back)
            model = made(case)
            state = next(iter(torch.load(back, weights_only=True).values()))
            missing, other = model.load_state_dict(state, strict=False)
            assert not other and all(name.startswith("model_ema.") for name in missing), (missing, other)
            for name, output in outputs(case, model).items():
                torch.testing.assert_close(output, torch.from_numpy(arrays[f"{case}/{name}"]), rtol=0, atol=1e-5)


if __name__ == "__main__":
    main()

"""Makes musiclm.npz, with musiclm-pytorch 0.2.8 in place of this repository's models, and shows that the public package
loads our files strictly and computes the same of them. From the repository's root:

pip install --no-deps musiclm-pytorch==0.2.8 x-clip accelerate beartype lion-pytorch vector-quantize-pytorch ftfy regex
python -m tests.models.reference.make_musiclm

torchaudio comes for older versions of PyTorch than today's, so the four transforms that the package takes from it are
replaced by the classes below: the power spectrogram as torchaudio documents it (torch.stft, a periodic Hann window),
with the names of its buffers. The others run in training alone, and nothing here trains. The replaced spectrogram and
buffers were compared with those of torchaudio 2.11, and all bits were equal.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tandem.models import MuLaN as Ours
from tandem.weights.formats.detection import FORMATS
from tandem.weights.formats.musiclm import save_public_mulan
from tests.models.reference.absent import unused
from tests.models.reference.musiclm import CASES, CONSTANTS, FILE, sounds, state_of, tokens


class Spectrogram(nn.Module):
    def __init__(
        self, n_fft: int, power: float, win_length: int, hop_length: int | None, pad: int, center: bool, pad_mode: str
    ) -> None:
        super().__init__()
        assert (power, pad, center) == (2, 0, True)
        self.n_fft, self.win_length, self.hop_length = n_fft, win_length, hop_length or win_length // 2
        self.pad_mode = pad_mode
        self.register_buffer("window", torch.hann_window(win_length))

    def forward(self, waveforms: Tensor) -> Tensor:
        spectrum = torch.stft(
            waveforms, self.n_fft, self.hop_length, self.win_length, self.window,  # type: ignore[arg-type]
            center=True, pad_mode=self.pad_mode, return_complex=True,
        )  # fmt: skip
        return spectrum.abs().pow(2)


class TimeStretch(nn.Module):
    def __init__(self, hop_length: float, n_freq: int = 201, fixed_rate: float | None = None) -> None:
        super().__init__()
        self.register_buffer("phase_advance", torch.linspace(0, math.pi * hop_length, n_freq)[:, None])


class Masking(nn.Module):
    def __init__(self, freq_mask_param: int = 0, time_mask_param: int = 0) -> None:
        super().__init__()


def replace_torchaudio() -> None:
    transforms: Any = ModuleType("torchaudio.transforms")
    transforms.Spectrogram, transforms.TimeStretch = Spectrogram, TimeStretch
    transforms.FrequencyMasking = transforms.TimeMasking = Masking
    sys.modules |= {"torchaudio": ModuleType("torchaudio"), "torchaudio.transforms": transforms}


@torch.no_grad()
def outputs_of(mulan: Any, case: str) -> dict[str, Tensor]:
    waveforms, texts = sounds(case), tokens(case)
    found = {"audio": mulan.get_audio_latents(waveforms), "text": mulan.get_text_latents(texts)}
    found["similarities"] = mulan(waveforms, texts, return_pairwise_similarities=True)
    if mulan.multi_layer_contrastive_learning is not None:

        def keep(module: nn.Module, latents: tuple[Tensor, Tensor]) -> None:
            found["audio layers"], found["text layers"] = latents

        mulan.multi_layer_contrastive_learning.contrast.register_forward_pre_hook(keep)
    found["loss"] = mulan(waveforms, texts)
    return found


def main() -> None:
    replace_torchaudio()
    unused(("audiolm_pytorch", "audiolm_pytorch.utils"))
    import musiclm_pytorch
    from musiclm_pytorch import AudioSpectrogramTransformer, MuLaN, TextTransformer

    torch.set_num_threads(1)
    arrays: dict[str, Any] = {}
    for case, (audio, text, options, _) in CASES.items():
        mulan = MuLaN(AudioSpectrogramTransformer(**audio), TextTransformer(**text), **options).eval()
        state = mulan.state_dict()
        shapes = {name: list(weight.shape) for name, weight in state.items()}
        constants = {name: tensor for name, tensor in state.items() if name.endswith(CONSTANTS)}
        mulan.load_state_dict({**constants, **state_of(case, shapes)})
        outputs = outputs_of(mulan, case)
        with tempfile.TemporaryDirectory() as folder:
            public, ours = Path(folder, "public.pt"), Path(folder, "ours.pt")
            torch.save(mulan.state_dict(), public)
            read = FORMATS["musiclm"].load(public)
            spectrogram = {"n_fft": audio.get("spec_n_fft", 128), "hop_length": audio.get("spec_hop_length", 12)}
            model = Ours.from_dict({**read.config, **spectrogram})
            model.load_state_dict(read.state_dict())
            call = save_public_mulan(model, ours).partition("load it into ")[2].partition(";")[0]
            back = eval(call, vars(musiclm_pytorch)).eval()
            back.load_state_dict(torch.load(ours, weights_only=True))
            back.contrast.decoupled_contrastive_learning = options.get("decoupled_contrastive_learning", True)
            if back.multi_layer_contrastive_learning is not None:
                of_layers = back.multi_layer_contrastive_learning.contrast
                of_layers.decoupled_contrastive_learning = back.contrast.decoupled_contrastive_learning
            for name, output in outputs_of(back, case).items():
                assert torch.equal(output, outputs[name]), (case, name)
        print(f"{case}: loaded strictly by {call}")
        arrays |= {f"{case}/{name}": output.numpy() for name, output in outputs.items()}
        arrays |= {f"{case}/constant/{name}": tensor.numpy() for name, tensor in constants.items()}
        arrays[f"{case}/shapes"] = np.frombuffer(json.dumps(shapes).encode(), dtype=np.uint8)
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()

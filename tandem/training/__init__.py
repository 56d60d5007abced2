"""What the training scripts use around their models and losses: the run, its loop, averages, losses, metrics, pictures.

Nothing here starts or connects processes: collectives are passed in as callables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.lazy import lazy_names

if TYPE_CHECKING:
    from .ema import make_ema
    from .evaluation import Evaluation, final_model
    from .loop import updates
    from .losses.gan import GANLoss, frames_of
    from .metrics.autoencoders import evaluate_autoencoder, reconstructions
    from .metrics.collapse import CollapseAlarm, ReconstructionAlarm
    from .metrics.fid import load_inception
    from .metrics.reconstruction import ReconstructionQuality
    from .metrics.videos import VideoQuality
    from .noise import Noise
    from .optimizers import make_optimizer
    from .run import Run
    from .visuals.images import Sample, code_histogram, grid
    from .visuals.videos import film

__all__ = [
    "CollapseAlarm", "Evaluation", "GANLoss", "Noise", "ReconstructionAlarm", "ReconstructionQuality",
    "Run", "Sample", "VideoQuality", "code_histogram", "evaluate_autoencoder", "film", "final_model", "frames_of",
    "grid", "load_inception", "make_ema", "make_optimizer", "reconstructions", "updates",
]  # fmt: skip

__getattr__ = lazy_names(__name__, {
    "CollapseAlarm": "metrics.collapse", "Evaluation": "evaluation", "GANLoss": "losses.gan", "Noise": "noise",
    "ReconstructionAlarm": "metrics.collapse", "ReconstructionQuality": "metrics.reconstruction", "Run": "run",
    "Sample": "visuals.images", "VideoQuality": "metrics.videos", "code_histogram": "visuals.images",
    "evaluate_autoencoder": "metrics.autoencoders", "film": "visuals.videos", "final_model": "evaluation",
    "frames_of": "losses.gan", "grid": "visuals.images", "load_inception": "metrics.fid", "make_ema": "ema",
    "make_optimizer": "optimizers", "reconstructions": "metrics.autoencoders", "updates": "loop",
})  # fmt: skip

"""What the training scripts use beside their models: the run, its loop, losses, averaged weights, metrics, pictures.

Nothing here starts or connects processes: the scripts pass a `ProcessGroup`, or its collectives as callables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.lazy import lazy_names

if TYPE_CHECKING:
    from .cascade import Cascade
    from .clips import ClipDraws, loss_of_frames
    from .ema import final_metric, final_weights, make_ema
    from .evaluation import Action, Evaluation, final_model
    from .generation import Generation, sampling_example
    from .loop import updates
    from .losses.alignment import Alignment
    from .losses.contrastive import Contrastive
    from .losses.diffusion import DiffusionDraws, LowresDraws
    from .losses.gan import GANLoss
    from .losses.grad_cache import grad_cache_losses
    from .losses.latents import LatentLosses
    from .metrics.autoencoders import evaluate_autoencoder, reconstructions
    from .metrics.averages import Averages
    from .metrics.collapse import CollapseAlarm, ReconstructionAlarm
    from .metrics.embedder import Embedder, text_inputs, width_of
    from .metrics.fid import load_inception
    from .metrics.generation import GenerationQuality, missing_metrics_text
    from .metrics.reconstruction import ReconstructionQuality
    from .metrics.retrieval import RetrievalQuality, class_embeddings, prompts
    from .metrics.unets import UnetErrors
    from .metrics.videos import VideoQuality
    from .noise import Noise
    from .optimizers import make_optimizer
    from .run import Run
    from .run_folder.best import BestModel
    from .visuals.images import Sample, code_histogram, grid
    from .visuals.sounds import best_matches, sounds_picture
    from .visuals.videos import film

__all__ = [
    "Action", "Alignment", "Averages", "BestModel", "Cascade", "ClipDraws", "CollapseAlarm", "Contrastive",
    "DiffusionDraws", "Embedder", "Evaluation", "GANLoss", "Generation", "GenerationQuality", "LatentLosses",
    "LowresDraws", "Noise", "ReconstructionAlarm", "ReconstructionQuality", "RetrievalQuality", "Run", "Sample",
    "UnetErrors", "VideoQuality", "best_matches", "class_embeddings", "code_histogram", "evaluate_autoencoder", "film",
    "final_metric", "final_model", "final_weights", "grad_cache_losses", "grid", "load_inception", "loss_of_frames",
    "make_ema", "make_optimizer", "missing_metrics_text", "prompts", "reconstructions", "sampling_example",
    "sounds_picture", "text_inputs", "updates", "width_of",
]  # fmt: skip

__getattr__ = lazy_names(__name__, {
    "Action": "evaluation", "Alignment": "losses.alignment", "Averages": "metrics.averages",
    "BestModel": "run_folder.best", "Cascade": "cascade", "ClipDraws": "clips", "CollapseAlarm": "metrics.collapse",
    "Contrastive": "losses.contrastive", "DiffusionDraws": "losses.diffusion", "Embedder": "metrics.embedder",
    "Evaluation": "evaluation", "GANLoss": "losses.gan", "Generation": "generation",
    "GenerationQuality": "metrics.generation", "LatentLosses": "losses.latents", "LowresDraws": "losses.diffusion",
    "Noise": "noise", "ReconstructionAlarm": "metrics.collapse", "ReconstructionQuality": "metrics.reconstruction",
    "RetrievalQuality": "metrics.retrieval", "Run": "run", "Sample": "visuals.images", "UnetErrors": "metrics.unets",
    "VideoQuality": "metrics.videos", "best_matches": "visuals.sounds", "class_embeddings": "metrics.retrieval",
    "code_histogram": "visuals.images", "evaluate_autoencoder": "metrics.autoencoders", "film": "visuals.videos",
    "final_metric": "ema", "final_model": "evaluation", "final_weights": "ema",
    "grad_cache_losses": "losses.grad_cache", "grid": "visuals.images", "load_inception": "metrics.fid",
    "loss_of_frames": "clips", "make_ema": "ema", "make_optimizer": "optimizers",
    "missing_metrics_text": "metrics.generation", "prompts": "metrics.retrieval",
    "reconstructions": "metrics.autoencoders", "sampling_example": "generation", "sounds_picture": "visuals.sounds",
    "text_inputs": "metrics.embedder", "updates": "loop", "width_of": "metrics.embedder",
})  # fmt: skip

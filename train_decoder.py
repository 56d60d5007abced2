"""Train a cascaded diffusion decoder: Unets that denoise pictures under a condition, such as CLIP's embedding of an
image or its caption. The first Unet samples small pictures, and each further one enlarges those of the one before.

    python train_decoder.py                                       # the demonstration, minutes on two cores
    python train_decoder.py --image_folder photos/                # one process, debugging
    torchrun --nproc_per_node 8 train_decoder.py --image_folder 'tars/{00000..00099}.tar'
    deepspeed train_decoder.py --deepspeed_config configs/deepspeed/zero2.json --image_folder tars/
    horovodrun -np 8 python train_decoder.py --image_folder tars/

All give the same numbers. Run the same command again to resume; see docs/running.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem import data, distributed, models, schedules, training
from tandem.config.data import ConditionedImageFlags
from tandem.config.decoder_training import DecoderFlags
from tandem.config.models.decoder import DecoderConfig, Sampling
from tandem.config.parser import ArgumentParser
from tandem.config.shared import ClipFlags, OptimizerFlags, RunFlags, ScheduleFlags
from tandem.launch import start_training, training_parser
from tandem.weights.load import init_model

if TYPE_CHECKING:  # PyTorch takes seconds to import: it is imported only after the arguments have been checked
    import torch
    from torch import Tensor


DEMO_CONFIG = Path(__file__).parent / "configs" / "decoder" / "demo.yaml"
# What the terminal shows of a line of metrics.jsonl, beside the error of each Unet.
COLUMNS = ("grad_norm", "valid/loss", "valid/fid", "valid/clip_score", "valid/lpips")


@dataclass
class Config(
    ConditionedImageFlags, ClipFlags, DecoderConfig, DecoderFlags, Sampling, ScheduleFlags, OptimizerFlags, RunFlags
):
    """Every flag of this script."""

    output_dir: str = "runs/decoder"
    batch_size: int = 64
    max_grad_norm: float = 0.5
    ema_decay: float = 0.999
    valid_fraction: float = 0.15


def build_parser() -> ArgumentParser:
    return training_parser("train_decoder.py", "Train a cascade of Unets.", Config)


def build_model(
    config: Config, widths: Mapping[str, Any], clip: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> models.Decoder:  # fmt: skip
    """The cascade with seeded weights, the same on every process, or with those of `--init_from`; for `widths` of the
    data and its `clip` see `DecoderConfig.from_data`. A line for the user goes to `say`."""

    def load(decoder: models.Decoder, source: models.Decoder, name: str) -> None:
        decoder.load_weights_from(source, name)
        if line := clip_mismatch_text(config, source.config["clip"], clip, name):
            say(line)

    decoder: models.Decoder = init_model(
        models.Decoder, config, load, config=DecoderConfig.from_data(config, widths, clip)
    )
    for number, unet in enumerate(decoder.unets, start=1):
        unet.requires_grad_(not config.train_unets or number in config.train_unets)
    return decoder


def clip_mismatch_text(
    config: Config, source_clip: Mapping[str, str] | None, run_clip: Mapping[str, str] | None, name: str
) -> str | None:
    """A warning in one line if the conditions of this run may differ from those that a decoder was trained with.

    Args:
        source_clip: `Clip.origin` of the decoder `name`; None if it has none.
        run_clip: That of this run; None if the data holds its conditions.
    """
    if not config.condition_on or source_clip is None or (run_clip and run_clip["sha256"] == source_clip["sha256"]):
        return None
    text = f"--clip {source_clip['name']} and weights {source_clip['weights']} (SHA-256 {source_clip['sha256']})"
    if run_clip is None:
        return f"{name} was trained with {text}: the embeddings in the data should come from the same weights"
    run_text = f"{run_clip['name']} and {run_clip['weights']} (SHA-256 {run_clip['sha256']})"
    return (
        f"{name} was trained with {text}, this run has {run_text}: unless they hold the same weights, the decoder has "
        "to learn its conditions anew"
    )


class UnetTraining:
    """What the training of one Unet needs beside its engine: losses, random numbers and the learning rate."""

    def __init__(self, config: Config, decoder: models.Decoder, number: int, device: torch.device) -> None:

        def unet_flag(name: str) -> Any:
            return getattr(config, name)[number - 1]

        self.decoder, self.index, self.batch_size = decoder, number - 1, config.batch_size
        self.module, schedule = decoder.unet(self.index), decoder.schedule(self.index)
        self.learning_rate, self.warmup = unet_flag("learning_rate"), unet_flag("lr_warmup_steps")
        self.crop, self.crop_noise = unet_flag("random_crop_sizes"), training.Noise(config.seed, f"unet{number}/crop")
        self.shape, self.full_shape = decoder.picture_shape(self.index, self.crop), decoder.picture_shape(self.index)
        self.optimizer = training.make_optimizer(
            self.module, self.learning_rate, config.betas, unet_flag("weight_decay"), lion=config.use_lion
        )
        lowres_schedule = decoder.lowres_schedule()
        self.loss = models.DiffusionLoss(
            schedule, unet_flag("objective"), weight=unet_flag("loss_weight"),
            learned_variance=bool(unet_flag("learned_variance")), lowres_schedule=lowres_schedule,
            min_snr_gamma=config.min_snr_gamma, p2_k=config.p2_loss_weight_k, p2_gamma=config.p2_loss_weight_gamma,
        )  # fmt: skip
        levels = lowres_schedule.timesteps if lowres_schedule else 0
        blur_prob = config.blur_prob if config.lowres_condition == "blur" else 0.0
        lowres_draws = training.LowresDraws(levels, blur_prob, (config.blur_sigma[0], config.blur_sigma[-1]))
        self.draws = training.DiffusionDraws(
            config.seed, f"unet{number}", config.timesteps, device=device, stratified=config.stratified_times,
            logit_normal=config.logit_normal if config.time_sampling == "logit_normal" else None,
            image_drop=config.image_cond_drop_prob if self.module.spec.image_embed_dim else None,
            text_drop=config.text_cond_drop_prob if self.module.spec.text_embed_dim else None,
            lowres=lowres_draws if self.index else None,
        )  # fmt: skip

    def losses(self, network: Any, batch: Mapping[str, Any], step: int) -> models.DiffusionLossOutput:
        """Losses (b,) of a micro-batch, with the random numbers of an update."""
        draws = self.draws(step, batch["positions"], self.batch_size, self.shape)
        crop_places = self.crop_noise.uniform(step, batch["positions"], (2,)) if self.crop else None
        blur = draws.pop("blur_sigma", None)
        x0, conditions = self.decoder.training_pictures(batch, self.index, blur, places=crop_places, crop=self.crop)
        return self.loss(network, x0, conditions, **draws)

    def validation_errors(self, network: Any, batch: Mapping[str, Any], total: int) -> tuple[Tensor, Tensor]:
        """Errors (b,) of a batch of the `total` validation samples, and their noise levels, the same at every step."""
        draws = self.draws.fixed(batch["positions"], total, self.full_shape)
        x0, conditions = self.decoder.training_pictures(batch, self.index, draws.pop("blur_sigma", None))
        return self.loss(network, x0, conditions, **draws).error, draws["times"]


def train(config: Config, backend: distributed.Backend) -> None:
    processes, device = backend.processes, backend.processes.device
    with processes.raise_on_all_ranks():
        heartbeat = partial(processes.heartbeat, "fetching weights")
        clip = models.Clip.from_file(config.clip, config.clip_weights, device, heartbeat) if config.clip else None
    embed = partial(models.with_embeddings, clip=clip, condition_on=config.condition_on)
    feed: Any = data.decoder_data(
        config, processes, image_size=config.image_sizes[-1], longest_text=config.max_text_len,
        tokenize=clip and clip.tokenize, **{f"takes_{kind}": kind in config.condition_on for kind in ("image", "text")},
    )  # fmt: skip
    stored_widths = data.widths_of(feed.first_samples)
    widths = {"image_embed": clip.embed_dim, "text_encodings": clip.text_shape} if clip else stored_widths
    with processes.raise_on_all_ranks():
        decoder = build_model(config, widths, clip.origin if clip else None, processes.say).to(device)
        lpips = models.load_lpips(config.lpips_weights, config.image_sizes[-1], device, heartbeat)
        inception = training.load_inception(config.fid_weights, device, heartbeat)
        unet_numbers = config.train_unets or range(1, len(decoder.unets) + 1)
        unets = {number: UnetTraining(config, decoder, number, device) for number in unet_numbers}
    columns = [*(f"unet{number}/error" for number in unet_numbers), *COLUMNS]
    run = training.Run(config, backend, feed, models={"decoder": decoder})

    # The second result of `training_pictures` for Unet 1 is the conditions: it has no other inputs.
    generation = training.Generation(
        feed, lambda batch: decoder.training_pictures(embed(batch), 0)[1], Sampling.from_args(config), processes,
        config.seed, run.check_stop_request, backend.autocast,
    )  # fmt: skip
    engines = {n: backend.wrap(unet.module, unet.optimizer, name=f"unet{n}") for n, unet in unets.items()}
    cascade = training.Cascade(decoder, {number - 1: engine for number, engine in engines.items()})
    ema = training.make_ema(cascade, config.ema_decay, config.ema_power, cascade.prefixes)
    metric = training.final_metric(ema, "loss")
    best = training.BestModel(
        run.folder.path, processes.is_root, metric=metric, lowest=True, broadcast=processes.broadcast_object
    )

    def validate(model: models.Decoder, batches: data.ValidationBatches, step: int) -> dict[str, float]:
        """Errors of the trained Unets over the validation split: overall, and by quarter of the noise levels."""
        errors = training.UnetErrors({n: unet.draws.quarters() for n, unet in unets.items()}, device)
        was_training = model.training
        model.eval()
        for batch in batches:
            embedded = embed(batch)
            for number, unet in unets.items():
                network = backend.autocast()(model.unets[number - 1])  # as in training: around the Unet, not the loss
                errors.add(number, *unet.validation_errors(network, embedded, batches.n_samples))
        model.train(was_training)
        return errors.result(processes.sum)

    def evaluate_pictures() -> dict[str, float]:
        """The quality of the pictures that the final weights draw."""
        quality = training.GenerationQuality(
            device, inception=inception, lpips=lpips and lpips.distances, cosines=clip.cosines if clip else ()
        )
        with training.final_weights(cascade, ema) as model:
            values = generation.measure(model, config.n_evaluation_samples, quality, clip)
        return {training.final_metric(ema, name): value for name, value in values.items()}

    evaluation = training.Evaluation(
        cascade, ema, write={"model": models.Decoder.save_pretrained}, best=best, picture_name="pictures",
        validate=validate, draw=lambda versions, batch, step: generation.draw(training.final_model(versions), batch),
        is_collective_draw=True, next_command=("sample.py", *training.sampling_example(config)),
    )  # fmt: skip
    has_picture_metrics = config.n_evaluation_samples and (config.fid_weights or config.lpips_weights or clip)
    picture_evaluation = training.Action(
        "picture quality", config.evaluate_every_n_steps, evaluate_pictures, measures=True
    )
    extra_actions = [picture_evaluation] if has_picture_metrics else []
    last_updates: dict[int, Any] = {}  # the newest Update of each Unet
    # The state of `cascade` is the weights of the other Unets, which are not trained.
    run.resume(columns, **{f"unet{n}": engine for n, engine in engines.items()}, others=cascade, ema=ema, best=best)
    if config.n_evaluation_samples:
        metric_weights = {"inception": config.fid_weights, "lpips": config.lpips_weights, "clip": config.clip}
        run.say(training.missing_metrics_text(metric_weights))

    # The bound is a sum over all levels: `timesteps` times the mean over sampled ones (Nichol and Dhariwal 2021).
    vb_weight = config.vb_loss_weight * config.timesteps
    with_warmup = partial(schedules.with_warmup, config.lr_schedule)

    for step, batch in training.updates(run, evaluation, preview=config.num_images_save, extra_actions=extra_actions):
        batch = embed(batch)
        for (number, engine), unet in zip(engines.items(), unets.values(), strict=True):
            engine.lr = with_warmup(step, run.progress.total_steps, unet.learning_rate, unet.warmup)
            for micro_batch in engine.micro_batches(batch):
                losses = unet.losses(engine, micro_batch, step)
                loss, error = (losses.weighted + vb_weight * losses.bits).mean(), losses.error.mean()
                engine.backward(loss)
                run.add(loss=loss, **{f"unet{number}/loss": loss, f"unet{number}/error": error})
            last_updates[number] = update = engine.step(with_norm=run.is_line_due)
            run.log(**{f"unet{number}/lr": update.lr, f"unet{number}/grad_norm": update.grad_norm})
        run.log(lr=engines[min(engines)].lr, grad_norm=sum(last.grad_norm**2 for last in last_updates.values()) ** 0.5)
        ema.update(*(last_updates[number].skipped for number in engines))


def main(argv: Sequence[str] | None = None) -> None:
    start_training(train, build_parser(), argv, DEMO_CONFIG)


if __name__ == "__main__":
    main()

"""Train MuLan: sounds and sentences are embedded in one space, in which a sound is near the sentences that describe it.

    python train_mulan.py                                     # the demonstration, minutes on two cores
    python train_mulan.py --audio_data sounds/                # one process, debugging
    torchrun --nproc_per_node 8 train_mulan.py --audio_data sounds/
    deepspeed train_mulan.py --deepspeed_config configs/deepspeed/zero2.json --audio_data sounds/
    horovodrun -np 8 python train_mulan.py --audio_data sounds/

All give the same numbers: every pair is compared with those of all processes and micro-batches, and the gradient is
that of one process which holds them all. Run the same command again to resume; see docs/running.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem import data, distributed, models, schedules, training
from tandem.config.converters import templates
from tandem.config.data import SoundFlags, data_path
from tandem.config.fields import flag
from tandem.config.models.mulan import NOT_IN_MUSICLM_FILE, MuLaNConfig, TowerFlags
from tandem.config.parser import ArgumentParser
from tandem.config.shared import VALIDATION, DecayingOptimizerFlags, RunFlags, start_flag
from tandem.launch import start_training, training_parser

if TYPE_CHECKING:  # PyTorch takes seconds to import: it is imported only after the arguments have been checked
    from PIL import Image

    from tandem.distributed import ProcessGroup

DEMO_CONFIG = Path(__file__).parent / "configs" / "mulan" / "demo.yaml"
# What the terminal shows of a line of metrics.jsonl.
COLUMNS = ("temperature", "audio_variance", "text_variance", "valid/r10", "valid/loss", "valid/zero_shot/top1")
PAIRS_SHOWN = 64  # in a picture of similarities


@dataclass
class ScriptFlags:
    """Where the weights come from, the loss, and what is measured."""

    init_from: str | None = start_flag(
        "start from a run, checkpoint, model/ or best/ folder or USER/NAME (Hub)", title="model"
    )
    loss: str = flag(
        "decoupled",
        "contrastive loss; only the memory of sigmoid does not grow with the number of processes",
        choices=("decoupled", "softmax", "sigmoid"),
        title="loss",
    )
    duplicates: str = flag(
        "masked",
        "what happens to two samples with equal captions: not compared (masked), or pushed apart (negatives)",
        choices=("masked", "negatives"),
    )
    zero_shot_templates: tuple[str, ...] = flag(
        ("{}", "the sound of {}", "a recording of {}"),
        "sentences with {} for the label, for zero-shot classification where the data has labels",
        templates,
        requires=VALIDATION,
        title="evaluation",
    )

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: ArgumentParser) -> None:
        """Refuse a batch of a single pair, and turn --data_max_length (samples) into --clip_seconds."""
        if args.batch_size < 2:
            parser.error("--batch_size 1 leaves a pair without anything to be compared with; give 2 or more")
        if args.data_max_length:
            seconds = args.data_max_length / args.sample_rate
            if "clip_seconds" in args.on_command_line and args.clip_seconds != seconds:
                other = f"but --clip_seconds {args.clip_seconds:g}"
                parser.error(f"--data_max_length {args.data_max_length} is {seconds:g} s, {other}; give one of them")
            args.clip_seconds = seconds


@dataclass
class Config(SoundFlags, MuLaNConfig, ScriptFlags, TowerFlags, DecayingOptimizerFlags, RunFlags):
    """Every flag of this script."""

    output_dir: str = "runs/mulan"
    lr_schedule: str = "cosine"
    lr_warmup_steps: int = 500
    batch_size: int = 32
    max_grad_norm: float = 0.5
    validate_every_n_steps: int = 500
    sample_every_n_steps: int = 500
    save_every_n_steps: int = 1000
    split_seed: int | None = 42


def build_parser() -> ArgumentParser:
    return training_parser("train_mulan.py", "Train MuLan.", Config)


def build_model(config: Config, tokenizer: data.Tokenizer) -> models.MuLaN:
    """The model with seeded weights, the same on every process, or with those of ``--init_from``. A resumed run takes
    its towers from its checkpoint: their files may be gone."""
    import torch

    from tandem.launch import describe_model
    from tandem.weights.formats.towers import load_towers, read_towers
    from tandem.weights.load import load_user_model, tokenizer_file

    paths = {name: getattr(config, name) for name in ("text_tower", "audio_tower")}
    resumed_settings = config.invocation.resumed or {}
    resumed_towers = [name for name, path in paths.items() if path and path == resumed_settings.get(name)]
    text, audio = (None if name in resumed_towers else path for name, path in paths.items())
    towers = read_towers(text, audio, config.text_tower_quick_gelu)
    tower_configs = {name: tower.config for name, tower in towers.items()}
    tower_configs |= {name: describe_model(config.output_dir)[name] for name in resumed_towers}
    torch.manual_seed(config.seed)
    arguments = {**MuLaNConfig.from_args(config).to_dict(), "vocab_size": tokenizer.vocab_size, **tower_configs}
    model: models.MuLaN = models.build_in_memory(models.MuLaN, **arguments)
    load_towers(model, towers, tokenizer)
    if config.init_from:
        source = load_user_model(config.init_from, "MuLaN", is_lazy=True)
        if Path(config.init_from).is_file():  # of musiclm-pytorch, whose files do not name their tokenizer
            source.config.update({name: model.config[name] for name in NOT_IN_MUSICLM_FILE})
        else:
            tokenizer.require_same(config.init_from, tokenizer_file(Path(config.init_from)))
        model.load_weights_from(source, config.init_from)
    return model


def evaluate(
    embedder: training.Embedder,
    batches: data.ValidationBatches,
    contrastive: training.Contrastive,
    templates: Sequence[str],
    processes: ProcessGroup,
) -> dict[str, float]:
    """Loss, retrieval in both directions and zero-shot classification over the validation split and all processes."""
    quality, losses = training.RetrievalQuality(processes.device), training.Averages("loss", device=processes.device)
    for batch in batches:
        out = embedder.pairs(batch)
        # The loss is that of the batch of all processes. Each process weights it by its own number of sounds.
        result = contrastive.value_and_gradients(out.audio, out.text, out.scale, out.bias, batch["caption_ids"])
        losses.add(loss=result.loss.expand(len(out.audio)))
        texts = [caption for captions in batch["all_captions"] for caption in captions]
        final_audio = out.audio[:, 0]  # without the outputs of --hierarchical_layers
        quality.add(final_audio, embedder.texts(texts), batch["all_captions"], batch["labels"])
    heartbeat = partial(processes.heartbeat, "ranking")
    values = {**losses.result(processes.sum), **quality.result(processes, heartbeat=heartbeat)}
    if classes := quality.classes(processes):
        class_vectors = training.class_embeddings(embedder.texts(training.prompts(classes, templates)), len(templates))
        values |= quality.zero_shot(processes, classes, class_vectors)
    return values


def draw_matches(embedder: training.Embedder, samples: data.Batch, count: int) -> Image.Image:
    """Spectrograms with the nearest captions, and the similarity of each sound to each caption."""
    sounds, texts = embedder.sounds(samples["waveforms"]), embedder.texts(samples["captions"])
    spectrograms = embedder.model.spectrogram(samples["waveforms"][:count])
    matches = training.best_matches(sounds[:count], texts, samples["captions"], samples["all_captions"][:count])
    return training.sounds_picture(spectrograms, matches, sounds @ texts.T)


def train(config: Config, backend: distributed.Backend) -> None:
    processes, device = backend.processes, backend.processes.device
    with processes.raise_on_all_ranks():
        marks_ends = config.layout == "tandem"  # musiclm-pytorch does not mark the start and the end of a text
        tokenizer = data.open_tokenizer(config.tokenizer, config.max_text_tokens, add_special_tokens=marks_ends)
        model = build_model(config, tokenizer).to(device)
        optimizer = training.make_optimizer(
            model, config.learning_rate, config.betas, config.weight_decay, lion=config.use_lion
        )
    feed = data.sound_data(config, processes, tokenizer)
    run = training.Run(config, backend, feed, models={"engine": model})

    engine = backend.wrap(model, optimizer, name="mulan")
    ema = training.make_ema(engine, config.ema_decay, config.ema_power)
    # With --batch_parts each process computes the loss of the whole batch: the same bits on any number of processes.
    contrastive = training.Contrastive(
        config.loss, processes, mask_duplicates=config.duplicates == "masked",
        is_replicated=backend.options.plan.batch_parts > 0,
    )  # fmt: skip
    noise, dropout = training.Noise(config.seed, "patches and masks"), training.Noise(config.seed, "dropout")
    best_metric, tie_metric = training.final_metric(ema, "r10"), training.final_metric(ema, "loss")
    best = training.BestModel(
        run.folder.path, processes.is_root, metric=best_metric, loss=tie_metric, broadcast=processes.broadcast_object
    )  # fmt: skip
    rows = config.batch_size // (processes.world_size * backend.grad_accum_steps)  # pairs per pass, as in training
    make_embedder = partial(training.Embedder, tokenizer=tokenizer, rows=rows, device=device, autocast=backend.autocast)

    def inputs(micro_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs of the model from a micro-batch; equal in both passes that an update makes over the micro-batch."""
        patch_noise = noise.uniform(run.progress.step, micro_batch["positions"], (model.noise_size,), device)
        texts = training.text_inputs(micro_batch["tokens"], micro_batch["lengths"])
        keys = dropout.keys(run.progress.step, micro_batch["positions"], device) if model.has_dropout else None
        return {"waveforms": micro_batch["waveforms"], **texts, "noise": patch_noise, "dropout_keys": keys}

    def write(module: models.MuLaN, folder: Path) -> None:
        module.save_pretrained(folder)
        tokenizer.save(folder)

    total_steps = run.progress.total_steps
    alarm = training.CollapseAlarm(after_steps=schedules.limit_warmup(config.lr_warmup_steps, total_steps))
    evaluation = training.Evaluation(
        engine, ema, write={"model": write}, best=best, picture_name="sounds and captions", watch=alarm.check,
        validate=lambda model, batches, step: evaluate(
            make_embedder(model), batches, contrastive, config.zero_shot_templates, processes
        ),
        draw=lambda versions, batch, step: draw_matches(
            make_embedder(training.final_model(versions)), batch, config.num_sounds_shown
        ),
        next_command=("embed.py", "--audio", data_path(config), "--output", f"{config.output_dir}/index"),
    )  # fmt: skip
    run.resume(COLUMNS, tokenizer=tokenizer, engine=engine, ema=ema, best=best)
    with processes.raise_on_all_ranks():
        if run.is_root and not run.is_complete:
            tokenizer.save(run.folder.path)  # the next start reads this copy
    with_warmup = partial(schedules.with_warmup, config.lr_schedule)

    def token_widths(step: int, batch: data.Batch) -> Sequence[int]:
        """The padded length, in tokens, of the texts of each micro-batch; an update's operations depend on it."""
        micro_batches = engine.micro_batches({"lengths": batch["lengths"]})
        return tuple(sorted(training.width_of(micro_batch["lengths"]) for micro_batch in micro_batches))

    for step, batch in training.updates(run, evaluation, preview=PAIRS_SHOWN, update_kind=token_widths):
        engine.lr = with_warmup(step, total_steps, config.learning_rate, config.lr_warmup_steps)
        # The value of the whole batch's loss, with its gradients with respect to the embeddings of a micro-batch.
        for loss, result in training.grad_cache_losses(engine, processes, contrastive, batch, inputs):
            engine.backward(loss, items=1, total=1)  # a sum over micro-batches and processes, not their mean
            run.log(**contrastive.metrics(result))
        update = engine.step(with_norm=run.is_line_due)
        ema.update(update.skipped)
        run.log(update)


def main(argv: Sequence[str] | None = None) -> None:
    start_training(train, build_parser(), argv, DEMO_CONFIG)


if __name__ == "__main__":
    main()

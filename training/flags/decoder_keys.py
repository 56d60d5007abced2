"""The keys of DALLE2-pytorch's training configurations, version 1.15.6, and what becomes of each. Keys that are in no
table are unknown there too, although most of the public package ignores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Flag(NamedTuple):
    """A key whose value is that of a flag; `usual` if it is absent, None: the flag's own default."""

    name: str
    usual: Any = None


class Only(NamedTuple):
    """A key without a flag: the values that are what happens here anyway, and what to do instead of others."""

    values: tuple[Any, ...]
    instead: str


ELSEWHERE = None  # a key that the code below reads
_EITHER = Only((True, False), "give true or false")  # without effect on what is trained
_IN_THE_FOLDER = Only(
    (), "leave it out: --output_dir holds checkpoints/, best/ and model/, which convert.py export writes as such a file"
)

Rules = Mapping[str, Flag | Only | None]

TOP: Rules = {
    **dict.fromkeys(("decoder", "data", "train", "evaluate", "tracker"), ELSEWHERE), "seed": Flag("seed", 0),
}  # fmt: skip
DECODER: Rules = {
    **dict.fromkeys(
        ("unets", "image_size", "image_sizes", "timesteps", "beta_schedule", "learned_variance", "predict_x_start",
         "predict_v", "use_noise_for_lowres_cond", "use_blur_for_lowres_cond", "lowres_noise_sample_level",
         "random_crop_sizes", "sample_timesteps", "clip", "unconditional", "p2_loss_weight_gamma",
         "use_dynamic_thres", "dynamic_thres_percentile")
    ),
    "loss_type": Flag("loss_type", "l2"), "image_cond_drop_prob": Flag("image_cond_drop_prob", 0.1),
    "text_cond_drop_prob": Flag("text_cond_drop_prob", 0.5), "blur_prob": Flag("blur_prob", 0.5),
    "blur_sigma": Flag("blur_sigma", 0.6), "p2_loss_weight_k": Flag("p2_loss_weight_k", 1),
    "vb_loss_weight": Flag("vb_loss_weight", 0.001), "ddim_sampling_eta": Flag("ddim_eta", 0.0),
    "channels": Only((3,), "pictures have 3 channels"),
    "blur_kernel_size": Only((3,), "leave it out: the kernel has 3 x 3 pixels"),
    "lowres_downsample_first": Only((True,), "leave it out: pictures are made smaller, then blurred, then enlarged"),
    "learned_variance_constrain_frac": Only((False,), "leave it out"),
    "auto_normalize_img": Only((True,), "leave it out: pictures are always scaled to -1 to 1"),
    "clip_denoised": Only((True,), "leave it out: estimates are always cut off at the range of pictures"),
    "clip_x_start": _EITHER,
    "vae": Only((), "leave it out: Unets are trained on pixels, not on latents"),
}  # fmt: skip
CLIP: Rules = {
    "make": ELSEWHERE, "model": ELSEWHERE,
    "base_model_kwargs": Only((), "name the path of an open_clip_config.json as the model"),
}  # fmt: skip
DATA: Rules = {
    "webdataset_base_url": Flag("image_folder"), "img_embeddings_url": Flag("image_embeddings"),
    "text_embeddings_url": Flag("text_embeddings"), "num_workers": Flag("num_workers", 4),
    "batch_size": Flag("batch_size", 64), "start_shard": Flag("start_shard", 0), "end_shard": ELSEWHERE,
    "shard_width": Flag("shard_width", 6), "index_width": Flag("index_width", 4), "splits": ELSEWHERE,
    "shuffle_train": Only((True,), "leave it out: the order of samples is always a random one"),
    "resample_train": Only((False,), "leave it out: every sample is drawn once in each epoch"),
    "preprocessing": ELSEWHERE,
}  # fmt: skip
SPLITS: Rules = dict.fromkeys(("train", "val", "test"))
PREPROCESSING: Rules = {
    "ToTensor": _EITHER, "RandomHorizontalFlip": ELSEWHERE,
    "RandomResizedCrop": Only(
        (False,), "leave it out: the square in the middle of each image is taken, as an embedding is of the whole image"
    ),
}  # fmt: skip
TRAIN: Rules = {
    "epochs": Flag("epochs", 20), "lr": Flag("learning_rate", 1e-4), "wd": Flag("weight_decay", 0.01),
    "warmup_steps": Flag("lr_warmup_steps", 0), "max_grad_norm": ELSEWHERE,
    "n_sample_images": Flag("num_images_save", 6), "cond_scale": Flag("cond_scale", 1.0),
    **dict.fromkeys(
        ("save_every_n_samples", "epoch_samples", "use_ema", "ema_beta", "unet_training_mask")
    ),
    "find_unused_parameters": _EITHER, "static_graph": _EITHER, "save_all": _EITHER, "save_latest": _EITHER,
    "save_best": _EITHER,
    "device": Only(("cuda:0", "cuda"), "leave it out: each process takes its own device"),
    "amp": Only((False,), "leave it out and give --precision bf16"),
    "validation_samples": Flag("valid_samples", 0),
    "save_immediately": Only((False,), "leave it out: a run that cannot be saved says so before it starts"),
}  # fmt: skip
EVALUATE: Rules = dict.fromkeys(("n_evaluation_samples", "FID", "IS", "KID", "LPIPS"))
MEASURES: Mapping[str, Rules] = {
    "FID": {"feature": Only((2048,), "leave it out: FID is that of 2048 features")},
    "IS": {
        "feature": Only(("logits_unbiased",), "leave it out: the score is that of the logits of 1008 classes"),
        "splits": Only((1,), "leave it out: the score is that of all pictures at once"),
    },
    "KID": {
        "feature": Only((2048,), "leave it out: KID is that of 2048 features"),
        "subsets": Only((100,), "leave it out: it is 100"),
        "subset_size": Only((1000,), "leave it out: subsets have 1000 pictures, or all if there are fewer"),
    },
    "LPIPS": {
        "net_type": Only(("vgg",), "give vgg, whose weights --lpips_weights takes"),
        "reduction": Only(("mean",), "leave it out: it is a mean"),
    },
}  # fmt: skip
TRACKER: Rules = {
    "data_path": Flag("output_dir"), "overwrite_data_path": _EITHER,  # a run that is there is resumed
    "log": ELSEWHERE, "load": ELSEWHERE, "save": ELSEWHERE,
}  # fmt: skip
LOG: Rules = {
    "log_type": ELSEWHERE, "wandb_entity": ELSEWHERE, "wandb_project": ELSEWHERE, "wandb_run_name": ELSEWHERE,
    "resume": _EITHER, "auto_resume": _EITHER, "verbose": _EITHER,  # a run's id is kept in its folder
    "wandb_run_id": Only(("",), "leave it out: the id is kept in --output_dir, where the run is resumed"),
}  # fmt: skip
LOAD: Rules = {
    "only_auto_resume": _EITHER,
    **dict.fromkeys(
        ("load_from", "file_path", "url", "wandb_run_path", "wandb_file_path"),
        Only(("",), "leave it out: make a model/ folder of the file by convert.py import, and give --init_from"),
    ),
}  # fmt: skip
SAVE: Rules = {
    "save_to": Only(("local",), "give local: nothing is uploaded; upload the model/ folder after the run"),
    **dict.fromkeys(("save_all", "save_latest", "save_best"), _EITHER),
    **dict.fromkeys(("save_latest_to", "save_best_to", "save_meta_to"), _IN_THE_FOLDER),
    "save_type": Only(("checkpoint", "model"), "give checkpoint or model"),
    "huggingface_repo": Only((), "leave it out: nothing is uploaded"),
    "token_path": Only((), "leave it out: nothing is uploaded"),
}  # fmt: skip
OF_A_UNET: Rules = {
    "channels": Only((3,), "pictures have 3 channels"), "attend_at_middle": Only((True,), "the middle always attends"),
    "out_dim": Only((), "leave it out: it has no effect"), "checkpoint_during_training": ELSEWHERE,
}  # fmt: skip

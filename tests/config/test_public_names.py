"""What the public scripts and trainers call their arguments: each is understood or answered, and means what the table
says."""

from __future__ import annotations

import argparse
import json
import math
from collections import ChainMap
from pathlib import Path
from typing import Any

import pytest
import yaml

import convert
from scripts import coming_from
from tandem.config.public_names import rows
from tests.scripts import DECODER, MULAN, SCRIPTS, VQGAN, Script

# As the signatures of the packages have them, at the versions that the page says.
ARGUMENTS = {
    "train_vae": """image_folder image_size epochs batch_size learning_rate lr_decay_rate starting_temp temp_min
        anneal_rate num_images_save num_tokens num_layers num_resnet_blocks smooth_l1_loss emb_dim hidden_dim
        kl_loss_weight transparent distributed_backend distr_backend deepspeed deepspeed_config deepscale
        deepscale_config deepspeed_mpi local_rank""",
    "train_vqgan": """vae folder num_train_steps batch_size image_size lr grad_accum_every max_grad_norm
        discr_max_grad_norm save_results_every save_model_every results_folder valid_frac random_split_seed use_ema
        ema_beta ema_update_after_step ema_update_every apply_grad_penalty_every accelerate_kwargs
        dim layers channels codebook_size l2_recon_loss use_hinge_loss vgg lookup_free_quantization vq_codebook_dim
        vq_commitment_weight vq_use_cosine_sim vq_kmeans_init lfq_diversity_gamma use_vgg_and_gan
        encdec_num_resnet_blocks encdec_layer_mults encdec_resnet_groups encdec_first_conv_kernel_size
        ddconfig lossconfig double_z z_channels resolution in_channels out_ch ch ch_mult num_res_blocks attn_resolutions
        dropout n_embed embed_dim ckpt_path base_learning_rate disc_start disc_weight disc_num_layers disc_ndf
        disc_in_channels disc_factor disc_loss disc_conditional use_actnorm codebook_weight pixelloss_weight kl_weight
        logvar_init perceptual_weight n_classes pixel_loss perceptual_loss target ignore_keys image_key colorize_nlabels
        monitor batch_resize_range scheduler_config lr_g_factor remap sane_index_shape temperature_scheduler_config
        wrap crop_size training_images_list_file accumulate_grad_batches""",
    "train_mulan": """mulan dataset num_train_steps batch_size data_max_length folder lr grad_accum_every betas
        max_grad_norm valid_frac random_split_seed save_model_every results_folder accelerate_kwargs use_lion
        force_clear_prev_results""",
    "train_tokenizer": """model batch_size num_train_steps learning_rate grad_accum_every apply_gradient_penalty_every
        max_grad_norm dataset dataset_folder dataset_type checkpoints_folder results_folder random_split_seed valid_frac
        validate_every_step checkpoint_every_step num_frames use_wandb_tracking project_name run_name
        discr_start_after_step warmup_steps
        scheduler scheduler_kwargs accelerate_kwargs ema_kwargs optimizer_kwargs dataset_kwargs""",
    "train_decoder": """config_file decoder accelerator dataloaders use_ema lr wd eps warmup_steps
        cosine_decay_max_steps max_grad_norm amp group_wd_params webdataset_base_url img_embeddings_url
        text_embeddings_url num_workers batch_size start_shard end_shard shard_width index_width splits shuffle_train
        resample_train preprocessing epochs save_every_n_samples n_sample_images cond_scale device epoch_samples
        validation_samples save_immediately ema_beta unet_training_mask find_unused_parameters static_graph unets
        image_size image_sizes clip channels timesteps sample_timesteps loss_type beta_schedule learned_variance
        image_cond_drop_prob text_cond_drop_prob n_evaluation_samples FID IS KID LPIPS data_path overwrite_data_path
        log load save log_type wandb_entity wandb_project wandb_run_name""",
}

each_script = pytest.mark.parametrize("script", SCRIPTS.values(), ids=lambda script: script.name)


@each_script
def test_every_public_argument_is_a_flag_or_is_answered(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    parser = script.module.build_parser()
    in_the_table = {row.name: row.package for row in reversed(rows(f"{script.name}.py"))}  # the first that has it
    for name in ARGUMENTS[script.name].split():
        assert name in in_the_table
        if f"--{name}" not in parser._option_string_actions:
            with pytest.raises(SystemExit) as raised:
                parser.parse([f"--{name}", "1"])
            line = capsys.readouterr().err
            assert raised.value.code == 2 and line.count("\n") == 1
            assert f"--{name}: {in_the_table[name]} " in line


@each_script
def test_every_row_of_the_page_is_true_of_the_flags(script: Script) -> None:
    parser = script.module.build_parser()
    known = parser._option_string_actions
    for row in rows(f"{script.name}.py"):
        if row.flag:
            assert known[f"--{row.name}"] is known[f"--{row.flag}"], row
        else:
            assert row.note, row
            assert f"--{row.name}" not in known or known[f"--{row.name}"].dest == row.name, row
        for word in row.note.replace(",", " ").replace(";", " ").split():
            assert not word.startswith("--") or word in {*known, "--help"}, row


def test_the_page_has_the_tables_of_the_file() -> None:
    text = coming_from.PAGE.read_text()
    assert coming_from.page(text) == text
    assert coming_from.page(text.replace("| 0.98 |", "| 0.97 |")) == text


def test_public_names_set_their_flags_on_the_command_line_and_in_yaml(tmp_path: Path) -> None:
    said = {"folder": "photos/", "num_train_steps": 7, "lr": 2e-4, "grad_accum_every": 4, "save_results_every": 50,
            "save_model_every": 60, "results_folder": "out", "valid_frac": 0.1, "ema_decay": 0.9}  # fmt: skip
    path = tmp_path / "muse.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in said.items()))
    lines = [[word for name, value in said.items() for word in (f"--{name}", str(value))], ["--config", str(path)]]
    for line in lines:
        args = VQGAN.parsed(*line)
        assert (args.image_folder, args.max_steps, args.learning_rate, args.output_dir) == ("photos/", 7, 2e-4, "out")
        assert (args.grad_accum_steps, args.sample_every_n_steps, args.save_every_n_steps) == (4, 50, 60)
        assert (args.valid_fraction, args.ema_decay, args.epochs) == (0.1, 0.9, 1e9)
    path.write_text("use_ema: true\n")
    line = VQGAN.refused_alone("--config", str(path))
    assert "'use_ema'" in line and "--ema_decay" in line


def test_a_config_and_a_flag_of_another_script_are_named_as_what_they_are(tmp_path: Path) -> None:
    for script, other in ((MULAN, VQGAN), (VQGAN, DECODER), (DECODER, MULAN)):
        for config in ("base", "demo"):
            line = script.refused_alone("--config", str(other.configs / f"{config}.yaml"))
            assert f"the file is a config of {other.name}.py" in line
    (tmp_path / "mixed.yaml").write_text("num_tokens: 5\nnum_workrs: 2\n")
    assert "config of" not in VQGAN.refused_alone("--config", str(tmp_path / "mixed.yaml"))
    line = MULAN.refused_alone("--quantizer", "vq")
    assert line.endswith("unknown flag --quantizer: it is a flag of train_tokenizer.py and train_vqgan.py")


def test_only_the_public_number_of_updates_outlasts_the_epochs() -> None:
    for flags, epochs in {
        ("--max_steps", "9"): 20, ("--num_train_steps", "9"): 1e9, ("--num_train_steps", "9", "--epochs", "3"): 3,
    }.items():  # fmt: skip
        assert MULAN.parsed(*flags).epochs == epochs


def test_a_run_says_it_at_its_start_and_a_batch_that_does_not_divide_is_told_the_product(tmp_path: Path) -> None:
    said = VQGAN.output_of(tmp_path, "--grad_accum_every", "2", "--num_train_steps", "1")
    assert "8 samples" in said and "2 micro-batches" in said and "= 16 here" in said
    line = VQGAN.refused(tmp_path / "2", "--batch_size", "4", "--grad_accum_every", "8")
    assert " 32 " in line and "micro-batches of 4" in line


# configs/*/base.yaml against the public defaults: those of the table, and these.

# Of each script, by the place where the package says so: what a flag has to be.
FACTS: dict[str, dict[str, dict[str, Any]]] = {
    "train_vae": {
        "DALLE-pytorch 1.6.6, train_vae.py, which has no validation": {"valid_fraction": 0.0, "random_flip": False},
        "DiscreteVAE.__init__": {"straight_through": False},
    },
    "train_vqgan": {
        "muse-maskgit-pytorch 0.3.5, README: batch_size 4 and grad_accum_every 8": {"batch_size": 32, "dim": 256},
        "trainers.py, ImageDataset.transform; random_split_seed": {"random_flip": True, "seed": 42},
        "VQGanVAETrainer": {"lr_warmup_steps": 0, "lr_schedule": "constant", "discr_start_step": 0},
        "VQGanVAE.__init__": {
            "num_layers": 4, "discr_layers": 4, "l2_recon_loss": False, "gan_loss": "hinge", "quantizer": "lfq",
            "codebook_size": 65536,
        },
        "ResnetEncDec.__init__": {"num_resnet_blocks": (1,)},
        "VQGanVAE.__init__, vq_kwargs": {"codebook_dim": 256, "vq_decay": 0.8, "vq_cosine": True},
        "vector-quantize-pytorch 1.11.8, LFQ.__init__": {"entropy_loss_weight": 0.1, "commitment_loss_weight": 0.25},
        "VQGanVAE.forward, gradient_penalty": {
            "normalize_input": False, "perceptual": "vgg", "perceptual_loss_weight": 1.0, "gan_weight": "adaptive",
            "gan_weight_scale": 1.0, "penalty": "one_centred", "penalty_weight": 10.0,
        },
    },
    "train_mulan": {
        "musiclm-pytorch 0.2.8, README": {
            "audio_dim": 512, "text_dim": 512, "audio_depth": 6, "text_depth": 6, "heads": 8, "dim_head": 64,
        },
        "AudioSpectrogramTransformer.__init__": {"patch_size": 16, "patch_dropout": 0.25},
        "TextTransformer.__init__": {"max_text_tokens": 256},
        "MuLaN.__init__": {"dim_latent": 128, "loss": "decoupled", "hierarchical_layers": 0},
        "SoftmaxContrastiveLearning, whose forward compares all pairs": {
            "duplicates": "negatives", "init_logit_scale": math.log(10.0),
        },
        "MuLaNTrainer: Adam or Lion, without a scheduler": {
            "weight_decay": 0.0, "lr_warmup_steps": 0, "lr_schedule": "constant",
        },
    },
    "train_tokenizer": {
        "magvit2-pytorch 0.5.1, README: batch_size 4 and grad_accum_every 8": {
            "batch_size": 32, "image_size": 128, "init_dim": 64, "max_dim": 512, "max_steps": 1_000_000,
            "codebook_size": 1024,
        },
        "VideoTokenizer.__init__": {
            "residual_kernel": 3, "input_kernel": 7, "output_kernel": 3, "pad_mode": "constant",
            "separate_first_frame": False, "entropy_loss_weight": 0.1, "commitment_loss_weight": 1.0,
            "diversity_gamma": 2.5, "soft_clamp": 10.0, "perceptual": "vgg", "perceptual_loss_weight": 0.1,
            "gan_weight_scale": 1.0, "penalty_weight": 10.0,
        },
        "gradient_penalty": {"penalty": "zero_centred"},
        "optimizer.py, get_optimizer": {"weight_decay": 0.01, "betas": (0.9, 0.99)},
        "VideoTokenizerTrainer.__init__, scheduler None": {"lr_schedule": "constant"},
        "ema-pytorch, EMA.__init__: beta 0.9999 at every tenth update": {"ema_decay": 0.99999},
    },
}  # fmt: skip


def based(script: Script) -> argparse.Namespace:
    return script.parsed("--config", str(script.configs / "base.yaml"))


@pytest.mark.parametrize("name", FACTS)
def test_the_base_configuration_has_the_public_defaults(name: str) -> None:
    script = SCRIPTS[name]
    args = vars(based(script))
    # A folder; an example, see FACTS; and a choice that is made otherwise there.
    others = ("output_dir", "grad_accum_steps", "batch_size")
    theirs = {row.flag: row.public_default for row in rows(f"{name}.py") if row.public_default != "(needed)"}
    said = {flag: yaml.safe_load(text) for flag, text in theirs.items() if flag in args and text and flag not in others}
    read = vars(script.module.build_parser().with_values(said))
    expected = {flag: read[flag] for flag in said} | dict(ChainMap(*FACTS[name].values()))
    assert {flag: args[flag] for flag in expected} == expected


def test_the_base_configuration_of_the_decoder_is_what_an_empty_public_configuration_gives(tmp_path: Path) -> None:
    old, new = tmp_path / "least.json", tmp_path / "least.yaml"
    old.write_text(json.dumps({"decoder": {"unets": [{"dim": 128, "dim_mults": [1, 2, 4, 8]}], "image_size": 64}}))
    convert.main(["config", str(old), str(new)])
    public, ours = vars(DECODER.parsed("--config", str(new))), vars(based(DECODER))
    for args in (public, ours):  # each of the two is another way to write the same
        args["cond_dim"], args["num_resnet_blocks"] = args["cond_dim"] or [128], args["num_resnet_blocks"][0][0]
    by_file = {"config", "explicit", "on_command_line", "aliases_used", "config_note", "split_by"}
    assert {k: v for k, v in ours.items() if k not in by_file} == {k: v for k, v in public.items() if k not in by_file}

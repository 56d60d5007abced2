"""convert.py: what a run leaves, looked at, carried to every form and back without losing a bit."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

import convert
from tandem.data.stores.output import sha256_of
from tandem.models import VQGAN, Decoder, DiscreteVAE, MaskBitDiscriminator, MuLaN
from tandem.weights.formats.detection import FORMATS
from tandem.weights.formats.muse import save_public_vqgan
from tandem.weights.load import open_model
from tests.models.helpers import assert_same_bits, prefixed
from tests.models.reference.autoencoders import CASES, WEIGHTS, state_of, written
from tests.scripts import DECODER, MULAN, VAE, edit_checkpoint, files, refusal
from tests.scripts import TOKENIZER as TOKENIZER_FILE
from tests.scripts import VQGAN as VQGAN_SCRIPT


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three updates of RGBA images, with a moving average. Tests only look at it."""
    said = ["--transparent", "--ema_decay", "0.2", "--max_steps", "3"]
    return VAE.train(tmp_path_factory.mktemp("runs") / "vae", *said)


def checkpoint_of(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def saved(path: Path, part: str) -> dict[str, Tensor]:
    """The weights of a part of a checkpoint, or of the newest one of a run, as safetensors has them."""
    tensors = load_file((checkpoint_of(path) if (path / "checkpoints").exists() else path) / f"{part}.safetensors")
    return {name.removeprefix("weights/"): w for name, w in tensors.items() if name.startswith("weights/")}


def converted(*words: object) -> None:
    convert.main([str(word) for word in words])


@pytest.fixture
def inspected(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What `convert.py inspect --json` says."""

    def said(*words: object) -> Any:
        capsys.readouterr()
        converted("inspect", *words, "--json")
        return json.loads(capsys.readouterr().out)

    return said


def refused(*words: object) -> str:
    line = refusal(convert.main, *words)
    assert line.startswith("convert.py")
    return line


def model_of(run: Path) -> dict[str, bytes]:
    """Its model folder, without what the run says of itself beside the model."""
    return {name: content for name, content in files(run / "model").items() if name != "training.json"}


def test_what_is_called_a_model_is_a_model_folder_a_run_a_checkpoint_or_a_pt(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    whole = open_model(run / "model", "DiscreteVAE")
    assert_same_bits(whole.model, load_file(run / "model" / "model.safetensors"))
    assert whole.identity["weights_sha256"] == sha256_of([run / "model" / "model.safetensors"])
    (unfinished := tmp_path / "unfinished").mkdir()
    for name in ("config.yaml", "checkpoints"):
        (unfinished / name).symlink_to(run / name)
    (extended := tmp_path / "extended").mkdir()
    shutil.copytree(run / "model", extended / "model")
    (extended / "model" / "training.json").write_text('{"step": 2}')
    for name in ("config.yaml", "checkpoints"):
        shutil.copytree(run / name, extended / name) if (run / name).is_dir() else shutil.copy(run / name, extended)
    (extended / "model" / "model.safetensors").write_bytes(b"of an earlier update")
    for path in (run, checkpoint_of(run), unfinished, extended, run / "vae-final.pt"):
        found = open_model(path, "DiscreteVAE")
        assert_same_bits(found.model, whole.model.state_dict())
        assert not found.model.training
        if path.is_dir():  # the file says less of how the model is trained
            assert found.identity == whole.identity
    assert not list((tmp_path / "temporary").iterdir()), "a killed process would leave it"
    with pytest.raises(ValueError, match="nowhere: it does not exist; expected a run folder"):
        open_model("nowhere")
    with pytest.raises(ValueError, match=f"is a run folder; its model is in {run / 'model'}"):
        DiscreteVAE.from_pretrained(run)


def test_an_exported_run_is_the_model_folder_that_the_run_wrote_itself(run: Path, tmp_path: Path) -> None:
    for path in (run, checkpoint_of(run), run / "model"):
        converted("export", path, "--to", "model", tmp_path / "out", "--force")
        assert files(tmp_path / "out") == model_of(run)
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize(("said", "part"), [("online", "engine"), ("ema", "ema"), ("best", "ema")])
def test_the_weights_that_are_asked_for_are_exported(run: Path, said: str, part: str, tmp_path: Path) -> None:
    converted("export", run, "--to", "model", tmp_path / "model", "--weights", said)
    assert_same_bits(DiscreteVAE.from_pretrained(tmp_path / "model").state_dict(), saved(run, part))
    assert not torch.equal(saved(run, "engine")["codebook.weight"], saved(run, "ema")["codebook.weight"])


def test_from_checkpoint_to_folder_to_pt_to_a_run_and_back_no_bit_changes(run: Path, tmp_path: Path) -> None:
    """A run adopts the shape of the model that it starts from: no default of the script stands against the weights."""
    converted("export", run, "--to", "model", tmp_path / "model", "--weights", "online")
    converted("export", tmp_path / "model", "--to", "dalle", tmp_path / "vae.pt")
    VAE.start_from(tmp_path / "vae.pt", tmp_path / "again")
    assert_same_bits(saved(tmp_path / "again", "engine"), saved(run, "engine"))
    (tmp_path / "vae.pt").unlink()  # where a run came from is nothing to its checkpoints
    converted("export", tmp_path / "again", "--to", "model", tmp_path / "back")
    assert files(tmp_path / "back") == files(tmp_path / "model")


def test_what_is_there_is_kept_without_force_and_replaced_with_it(run: Path, tmp_path: Path) -> None:
    for kind, out in (("model", tmp_path / "model"), ("dalle", tmp_path / "vae.pt")):
        converted("export", run, "--to", kind, out, "--weights", "online")
        before = files(tmp_path)
        assert "--force" in refused("export", run, "--to", kind, out)
        assert files(tmp_path) == before
        converted("export", run, "--to", kind, out, "--force")
        assert files(tmp_path) != before
        other = "dalle" if kind == "model" else "model"
        assert f"--to {other} writes a" in refused("export", run, "--to", other, out, "--force")
    line = refused("export", tmp_path / "model", "--to", "model", tmp_path / "other", "--weights", "online")
    assert "one set of weights" in line and not (tmp_path / "other").exists()
    assert_same_bits(FORMATS["dalle"].load(tmp_path / "vae.pt").state_dict(), saved(run, "ema"))


def test_a_run_of_mulan_is_exported_from_mid_run_and_started_from_with_its_tokenizer(
    tmp_path: Path, inspected: Any
) -> None:
    run, new, own = tmp_path / "run", tmp_path / "new", Path(shutil.copy(TOKENIZER_FILE, tmp_path / "words.json"))
    said = ["--tokenizer", str(own), "--hierarchical_layers", "1", "--ema_decay", "0.5"]
    MULAN.train(run, *said, "--max_steps", "2", "--save_every_n_steps", "1")
    early, content = run / "checkpoints" / "step_00000001", model_of(run)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").write_text("of the model that was there before")
    for path in (run, checkpoint_of(run), run / "model"):
        converted("export", path, "--to", "model", tmp_path / "out", "--force")
        assert files(tmp_path / "out") == content
    converted("export", early, "--to", "model", tmp_path / "early", "--weights", "online")
    assert_same_bits(MuLaN.from_pretrained(tmp_path / "early"), saved(early, "engine"))
    assert inspected(early)["parts"]["engine"]["optimizer_step"] == 1
    MULAN.start_from(early, new)
    torch.testing.assert_close(saved(new, "engine"), dict(open_model(early, "MuLaN").model.state_dict()))
    assert yaml.safe_load((new / "config.yaml").read_text())["tokenizer"] == str(own)
    own.write_text("another")  # those in the run folder, model/ and best/ are the run's own
    converted("export", early, "--to", "model", tmp_path / "again")
    assert files(tmp_path / "again")["tokenizer.json"] == content["tokenizer.json"]
    for folder in (run, run / "model", run / "best"):
        (folder / "tokenizer.json").unlink(missing_ok=True)
    assert str(own) in refused("export", early, "--to", "model", tmp_path / "lost")
    assert not (tmp_path / "lost").exists()


def test_a_run_of_the_decoder_is_started_from_and_exported_to_the_public_package_and_back(
    tmp_path: Path, inspected: Any
) -> None:
    run, new = tmp_path / "run", tmp_path / "new"
    public = ["--cross_attn_heads", "8", "--cross_attn_dim_head", "64", "--no-zero_terminal_snr"]
    DECODER.train(run, *DECODER.eight, *public, "--max_steps", "2", "--ema_decay", "0.5")
    converted("export", run, "--to", "model", tmp_path / "model")
    assert files(tmp_path / "model") == model_of(run)
    converted("export", run, "--to", "model", tmp_path / "online", "--weights", "online")
    online = Decoder.from_pretrained(tmp_path / "online").state_dict()
    trained = {DECODER.weight(f"{part}: weights/{name}"): tensor for part in ("unet1", "unet2")
               for name, tensor in saved(run, part).items() if not name.startswith("loss_weight.")}  # fmt: skip
    assert_same_bits(online, trained)
    again = Decoder.from_pretrained(DECODER.start_from(run, new) / "model")
    assert again.config == Decoder.from_pretrained(tmp_path / "online").config
    unlearned = ["--max_steps", "1", "--learned_variance", "0", "--switches", "none", "none", *public]
    DECODER.train(tmp_path / "plain", *unlearned)
    file = tmp_path / "decoder.pth"
    converted("export", tmp_path / "plain", "--to", "dalle2", file)
    assert inspected(file)["kind"] == "DALLE2-pytorch file"
    converted("export", file, "--to", "model", tmp_path / "back")
    ours, back = (Decoder.from_pretrained(folder) for folder in (tmp_path / "plain" / "model", tmp_path / "back"))
    x, time, embed = torch.randn(2, 3, 16, 16), torch.tensor([3, 700]), torch.randn(2, 30)
    for given, index in (({"image_embed": embed}, 0), ({"lowres_image": x}, 1)):
        # The file has the scale of embeddings and the second root of attention in its weights, which rounds them.
        outputs = [model.unet(index)(x, time, **given) for model in (ours, back)]
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    DECODER.train(tmp_path / "other", "--max_steps", "1")
    assert "DALLE2-pytorch has no such unet" in refused("export", tmp_path / "other", "--to", "dalle2", file, "--force")


@pytest.fixture(scope="module")
def vqgan_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates of a VQGAN that the public package may have, with a moving average. Tests only look at it."""
    said = "--dim 16 --no-normalize_input --max_steps 2 --ema_decay 0.5 --save_every_n_steps 1"
    return VQGAN_SCRIPT.train(tmp_path_factory.mktemp("runs") / "vqgan", *said.split())


def test_a_run_of_the_vqgan_becomes_the_public_file_with_its_discriminator_and_comes_back(
    vqgan_run: Path, tmp_path: Path, inspected: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    early = vqgan_run / "checkpoints" / "step_00000001"
    file, average = tmp_path / "vae.pt", saved(vqgan_run, "ema")
    for path, said in ((vqgan_run, []), (checkpoint_of(vqgan_run), ["--weights", "online"]), (early, [])):
        capsys.readouterr()
        converted("export", path, "--to", "muse", file, "--force", *said)
        call = (
            "VQGanVAE(dim=16, channels=3, codebook_size=64, layers=2, encdec_num_resnet_blocks=(0, 1), discr_layers=2)"
        )
        assert capsys.readouterr().out.endswith(f"load it into {call}\n")
        found = torch.load(file, weights_only=True)
        discriminator = {name: tensor for name, tensor in found.items() if name.startswith("discr.")}
        assert_same_bits(discriminator, prefixed("discr.", saved(path, "discriminator")))
        assert torch.equal(found["enc_dec.encoders.0.weight"], average["encoder.0.weight"]) == (path == vqgan_run)
    shutil.copytree(vqgan_run / "model", tmp_path / "alone", ignore=shutil.ignore_patterns("discriminator"))
    converted("export", tmp_path / "alone", "--to", "muse", tmp_path / "alone.pt")
    assert "use_vgg_and_gan=False" in capsys.readouterr().out
    converted("export", vqgan_run, "--to", "muse", file, "--force")
    facts = inspected(file)
    assert (facts["model"], facts["arguments"]["dim"], facts["discriminator"]["layers"]) == ("VQGAN", 16, 2)
    converted("export", file, "--to", "model", tmp_path / "back")
    assert_same_bits(load_file(tmp_path / "back" / "model.safetensors"), average)
    assert_same_bits(open_model(file, "VQGAN").model, average)  # of encode.py


def test_the_discriminator_travels_with_the_model(vqgan_run: Path, tmp_path: Path) -> None:
    """At the end of a run, out of a checkpoint and a public file, and into the next run."""
    discriminator = saved(vqgan_run, "discriminator")
    converted("export", checkpoint_of(vqgan_run), "--to", "model", tmp_path / "checkpoint")
    converted("export", tmp_path / "checkpoint", "--to", "model", tmp_path / "again")
    converted("export", vqgan_run, "--to", "muse", tmp_path / "vae.pt")
    converted("export", tmp_path / "vae.pt", "--to", "model", tmp_path / "file")
    statements = []
    for folder in (vqgan_run / "model", *(tmp_path / name for name in ("checkpoint", "again", "file"))):
        assert_same_bits(load_file(folder / "discriminator" / "model.safetensors"), discriminator)
        statements.append(json.loads((folder / "discriminator" / "config.json").read_text())["training"])
    of_run, *others = statements
    losses = {"gan_loss": "hinge", "perceptual": "none", "penalty_weight": 10.0, "kl_loss_weight": 5e-7}
    assert {"weights": "online", "updates": 2, **losses}.items() <= of_run.items()
    assert others == [of_run, of_run, {"weights": "online"}]
    assert "/" not in json.dumps(of_run), "no paths"

    run = VQGAN_SCRIPT.start_from(tmp_path / "again", tmp_path / "next", "--image_size", "16")
    assert_same_bits(saved(run, "discriminator"), discriminator)
    new = ("--image_size", "16", "--no-init_discriminator", "--discr_layers", "2", "--discr_dim", "16")
    other = saved(VQGAN_SCRIPT.start_from(tmp_path / "again", tmp_path / "new", *new), "discriminator")
    assert other.keys() == discriminator.keys() and not torch.equal(
        *(d["layers.0.0.weight"] for d in (other, discriminator))
    )
    converted("export", vqgan_run, "--to", "model", tmp_path / "file", "--force", "--weights", "online")
    shutil.rmtree(tmp_path / "again" / "discriminator")
    converted("export", tmp_path / "again", "--to", "model", tmp_path / "file", "--force")
    assert not (tmp_path / "file" / "discriminator").exists(), "that of another model"


def test_a_discriminator_of_another_kind_is_left_out_of_the_public_file(tmp_path: Path) -> None:
    model = VQGAN.from_dict({"dim": 16, "num_layers": 2, "codebook_size": 64, "normalize_input": False})
    said = save_public_vqgan(model, tmp_path / "vae.pt", MaskBitDiscriminator.from_dict({"dim": 16, "layers": 2}))
    assert "none of MaskBit's kind" in said and "use_vgg_and_gan=False" in said
    assert not [name for name in torch.load(tmp_path / "vae.pt", weights_only=True) if name.startswith("discr.")]


def test_a_training_starts_from_a_public_file_with_its_discriminator(vqgan_run: Path, tmp_path: Path) -> None:
    converted("export", vqgan_run, "--to", "muse", tmp_path / "vae.pt")
    run = VQGAN_SCRIPT.start_from(tmp_path / "vae.pt", tmp_path / "new", "--image_size", "16", "--no-normalize_input")
    adopted = yaml.safe_load((run / "config.yaml").read_text())
    assert {"discr_dim": 16, "discr_layers": 2, "num_layers": 2, "quantizer": "lfq"}.items() <= adopted.items()
    for part, ours in (("ema", "generator"), ("discriminator", "discriminator")):
        assert_same_bits(saved(run, ours), saved(vqgan_run, part))
    said = "--init_from", str(tmp_path / "vae.pt"), "--dim", "16", "--discr_dim", "8"
    needed = (
        "needs --discriminator muse --discr_dim 16 --discr_layers 2; to begin with a new one: --no-init_discriminator"
    )
    assert needed in VQGAN_SCRIPT.refused(tmp_path / "x", *said)
    said = "--init_from", str(tmp_path / "vae.pt"), "--dim", "16", "--discriminator", "maskbit"
    assert needed in VQGAN_SCRIPT.refused(tmp_path / "x", *said)
    line = refused("export", tmp_path / "vae.pt", "--to", "dalle", tmp_path / "x")
    assert "DiscreteVAE" in line and f"{tmp_path / 'vae.pt'} holds a VQGAN" in line


@pytest.mark.parametrize(("case", "to", "back"), [
    ("sd3", "diffusers", WEIGHTS), ("vq", "diffusers", WEIGHTS), ("taming", "taming", ""), ("ldm", "taming", ""),
])  # fmt: skip
def test_a_training_goes_on_from_a_public_autoencoder_and_its_weights_go_back(
    case: str, to: str, back: str, tmp_path: Path
) -> None:
    """The run has the shape of the file, without a flag that says it; the codebook has moved, and nothing else."""
    path, state = written(case, tmp_path), state_of(case)
    run = VQGAN_SCRIPT.start_from(path, tmp_path / "new", "--image_size", "16", "--discr_layers", "2")
    adopted, ours = open_model(run, "VQGAN").model.config, CASES[case].ours
    assert {name: adopted[name] for name in ours if "_factor" not in name}.items() <= ours.items()
    converted("export", run, "--to", to, tmp_path / "back", "--weights", "online")
    out = tmp_path / "back" / back
    written_back = load_file(out) if back else torch.load(out, weights_only=True)["state_dict"]
    moved = {"quantize.embedding.weight"} & state.keys()
    assert written_back.keys() == state.keys()
    assert {name for name in state if not torch.equal(written_back[name], state[name])} == moved


def test_the_scale_of_latents_is_kept_where_a_file_says_it_and_else_measured(tmp_path: Path, inspected: Any) -> None:
    for case in ("sd3", "ldm"):
        path = written(case, tmp_path)
        run = VQGAN_SCRIPT.start_from(path, tmp_path / f"run-{case}", "--image_size", "16", "--discr_layers", "2")
        converted("export", run, "--to", "model" if case == "ldm" else "diffusers", tmp_path / f"back-{case}")
    kept, measured = (json.loads((tmp_path / f"back-{case}" / "config.json").read_text()) for case in ("sd3", "ldm"))
    assert (kept["scaling_factor"], kept["shift_factor"]) == (1.5305, 0.0609)
    model = open_model(tmp_path / "run-ldm", "VQGAN").model
    assert (measured["scaling_factor"], measured["shift_factor"]) == (model.scaling_factor, model.shift_factor)
    for source, scale in (("run-ldm", measured), ("back-ldm", measured), ("run-sd3", kept)):
        said = inspected(tmp_path / source)
        (arguments,) = [said["models"]["generator"]] if "models" in said else [said["arguments"]]
        assert [arguments[name] for name in ("scaling_factor", "shift_factor")] == [
            pytest.approx(scale[name], rel=1e-6) for name in ("scaling_factor", "shift_factor")
        ]
    for case in ("sd3", "ldm"):
        said = inspected(tmp_path / f"run-{case}")["models"]["generator"]
        run = open_model(tmp_path / f"run-{case}", "VQGAN").model
        assert (said["latents_mean"], said["latents_std"]) == (run.latents_mean, run.latents_std) and run.latents_std


@pytest.fixture(scope="module")
def powers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight updates of a model with buffers, and a save after every second one. Tests only look at it."""
    folder = tmp_path_factory.mktemp("runs") / "powers"
    said = "--quantizer vq --ema_power 0.1 0.05 --max_steps 8 --save_every_n_steps 2 --learning_rate 0.01"
    return VQGAN_SCRIPT.train(folder, *said.split())


def test_an_average_of_another_length_is_written_as_a_model_with_the_newest_buffers(
    powers: Path, tmp_path: Path
) -> None:
    """Its numbers are in tests/training/checkpoint/test_averages.py; no average averages buffers."""
    converted("average", powers, "--ema_length", "0.07", tmp_path / "model")
    model, newest = VQGAN.from_pretrained(tmp_path / "model"), load_file(max((powers / "snapshots").iterdir()))
    for is_same, tensors in ((False, model.named_parameters()), (True, model.named_buffers())):
        assert {torch.equal(tensor, newest[name]) for name, tensor in tensors} == {is_same}


def test_an_average_that_cannot_be_made_is_one_line(powers: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert "--ema_power" in refused("average", run, "--ema_length", "0.07", out)
    assert "length 0.25" in refused("average", powers, "--ema_length", "0.25", out)
    assert "at most 0.2886" in refused("average", powers, "--ema_length", "0.3", out)
    assert not out.exists()
    copied = shutil.copytree(powers, tmp_path / "copied")
    newest = copied / "snapshots" / "step_00000008_ema_0.1.safetensors"
    save_file({"a": torch.zeros(3)}, newest, metadata={"average": '{"updates": 8, "length": 0.1}'})
    assert "should have shape" in refused("average", copied, "--ema_length", "0.07", tmp_path / "other")
    (copied / "snapshots" / "step_00000009_ema_0.1.safetensors").write_bytes(b"\0" * 100)
    assert "cannot read" in refused("average", copied, "--ema_length", "0.07", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_is_described(run: Path, inspected: Any) -> None:
    facts = inspected(run)
    parameters = sum(tensor.numel() for tensor in DiscreteVAE.from_pretrained(run / "model").state_dict().values())
    weights = {"tensors": len(saved(run, "engine")), "parameters": parameters, "dtype": "float32"}
    assert facts["path"] == str(checkpoint_of(run)) and facts["kind"] == "checkpoint"
    assert (facts["step"], facts["samples"], facts["checksums"]) == (3, 24, "hold")
    assert facts["parts"]["engine"] == {**weights, "optimizer": "Adam", "optimizer_step": 3}
    assert facts["parts"]["ema"] == weights
    assert facts["parts"].keys() >= {"engine", "ema", "progress", "bad_samples"}
    said = facts["written_by"]
    assert (said["backend"], said["world_size"], said["precision"], said["batch_size"]) == ("single", 1, "fp32", 8)
    assert facts["bytes"] == {path.name: path.stat().st_size for path in checkpoint_of(run).iterdir()}


def test_a_flipped_bit_is_told_unless_checksums_are_left_out(
    run: Path, tmp_path: Path, inspected: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(checkpoint_of(run), tmp_path / "copy")
    content = bytearray((folder / "engine.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "engine.safetensors").write_bytes(content)
    with pytest.raises(SystemExit) as raised:
        converted("inspect", folder, "--json")
    facts = json.loads(capsys.readouterr().out)
    assert raised.value.code == 1 and facts["step"] == 3
    assert facts["checksums"].startswith("do not hold: ") and "engine.safetensors" in facts["checksums"]
    assert inspected(folder, "--no_checksums")["checksums"] == "not checked"


def alone(run: Path, tmp: Path) -> Path:
    """A copy of the run that holds its checkpoints and nothing else."""
    shutil.copytree(run / "checkpoints", tmp / "run" / "checkpoints")
    return tmp / "run"


def described_as(run: Path, tmp: Path, **changes: Any) -> Path:
    """A checkpoint of the run that says something else of its model."""
    folder = alone(run, tmp) / "checkpoints" / checkpoint_of(run).name
    edit_checkpoint(folder, lambda parts: parts["models"]["engine"].update(changes))
    return folder


def undescribed(run: Path, tmp: Path) -> Path:
    """A checkpoint as earlier versions wrote it."""
    folder = alone(run, tmp) / "checkpoints" / checkpoint_of(run).name
    (folder / "models.safetensors").unlink()
    edit_checkpoint(folder, lambda parts: parts.pop("models"))
    return folder


MISTAKES: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "nothing there": (lambda run, tmp: tmp / "nowhere", "nowhere"),
    "an empty folder": (lambda run, tmp: tmp, "expected a run folder"),
    "other sizes": (lambda run, tmp: described_as(run, tmp, num_tokens=17), "(17, 6)"),
    "4 million blocks": (lambda run, tmp: described_as(run, tmp, num_resnet_blocks=4 << 20), "many more"),
    "an argument of a later one": (
        lambda run, tmp: described_as(run, tmp, colour="red"),
        "version, whose DiscreteVAE has 'colour'",
    ),
    "no model": (lambda run, tmp: described_as(run, tmp, model="build_in_memory"), "no model of this version"),
    "a name that is no text": (lambda run, tmp: described_as(run, tmp, model=["DiscreteVAE"]), "what its models are"),
    "an earlier version": (undescribed, "was written by an earlier version"),
    "a picture": (lambda run, tmp: next((run / "samples").iterdir()), "a picture or a sound"),
}


@pytest.mark.parametrize(("make", "complaint"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    make: Callable[[Path, Path], Path], complaint: str, run: Path, tmp_path: Path
) -> None:
    assert complaint in refused("export", make(run, tmp_path), "--to", "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()

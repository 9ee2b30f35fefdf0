"""Sources that import refuses, in one sentence and before anything stays: damaged, contradictory, of another model."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from mup_megatron import cli
from mup_megatron.checkpoints.checkpoint import SUMS
from mup_megatron.convert.export import export_hugging_face, export_megatron
from mup_megatron.convert.export.fold import fold
from mup_megatron.convert.export.unfinished import LIST
from mup_megatron.convert.importing import hugging_face, import_checkpoint
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import DiskFull, UserError
from tests.convert.sources import Trained
from tests.convert.test_importing import config_for
from tests.engines.test_full_disk import Disk

pytestmark = pytest.mark.usefixtures("one_thread")

# Keys of config.json, and the sentence.
CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "RoPE's base in two places": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        "config.json: rope_theta is 10000.0 at the top and 500000.0 in rope_parameters; expected the same in both",
    ),
    "RoPE's type in two places": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "config.json: rope_type is 'linear' in rope_scaling and 'default' in rope_parameters; expected the same in",
    ),
    "head_dim": ({"head_dim": 16}, "config.json: head_dim is 16, and by "),
    "head_dim by default": ({"head_dim": None}, "config.json: head_dim is 16, and by "),  # 64 / 4, and 24 is right
    "quantized": (
        {"quantization_config": {"quant_method": "fp8"}},
        "config.json: quantization_config is there; expected weights that are not quantized",
    ),
}
NORM = "model.layers.1.input_layernorm.weight"
BAD_NUMBERS = {
    "integers": f"hf: {NORM} is of I32; expected one of F64, F32, F16, BF16",
    "NaN": f"hf: {NORM}: 1 of 64 numbers are NaN or infinite; expected finite weights",
    "infinite": f"hf: {NORM}: 2 of 64 numbers are NaN or infinite; expected finite weights",
    "infinite as float32": f"hf: {NORM}: 1 of 64 numbers are NaN or infinite; expected finite weights",
}


def spoil_numbers(weights: Path, what: str) -> None:
    """Has one tensor hold what training could not go on from."""
    tensors = load_file(weights)
    norm = tensors[NORM]
    if what == "integers":  # the same bytes under another name, of the same length
        header = f'"{NORM}":{{"dtype":"F32"'.encode()
        content = weights.read_bytes()
        assert content.count(header) == 1
        weights.write_bytes(content.replace(header, header.replace(b"F32", b"I32")))
        return
    if what == "NaN":
        norm[3] = torch.nan
    elif what == "infinite":
        norm[0], norm[63] = torch.inf, -torch.inf
    else:
        tensors[NORM] = norm.double().index_fill(0, torch.tensor([5]), 1e39)
    save_file(tensors, weights, {"format": "pt"})


LIES = {"num_hidden_layers": 3, "intermediate_size": 160, "num_attention_heads": 8, "num_key_value_heads": 4}


def damage(folder: Path, what: str) -> str:
    """Spoils a Hugging Face folder; the sentence that it gets."""
    weights, described = folder / "model.safetensors", folder / "config.json"
    said = json.loads(described.read_text())
    tensors = load_file(weights)
    if what in LIES:
        described.write_text(json.dumps({**said, what: LIES[what]}))
        return f"config.json: {what} is {LIES[what]}, and by "
    if what == "scaled RoPE":
        scaled = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}
        described.write_text(json.dumps({**said, "rope_parameters": scaled}))
        return "config.json: rope_type of its RoPE is 'llama3', and by the config 'default'"
    if what in CONTRADICTIONS:
        changes, sentence = CONTRADICTIONS[what]
        described.write_text(json.dumps({**said, **changes}))
        return sentence
    if what in BAD_NUMBERS:
        spoil_numbers(weights, what)
        return BAD_NUMBERS[what]
    if what.startswith("shard"):
        names = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
        keys = sorted(tensors)
        for name, part in zip(names, (keys[:9], keys[9:]), strict=True):
            save_file({key: tensors[key] for key in part}, folder / name)
        places = {key: names[key not in keys[:9]] for key in keys}
        weights.unlink()
        if what == "shard gone":
            (folder / names[1]).unlink()
            sentence = f"{names[1]} is missing; model.safetensors.index.json lists it"
        elif what == "shard cut":
            (folder / names[1]).write_bytes((folder / names[1]).read_bytes()[:-40])
            sentence = f"{names[1]}: damaged ("
        else:
            places[keys[0]] = "../" + names[0]
            sentence = "is missing; model.safetensors.index.json lists it"
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return sentence
    if what == "two kinds":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))
        return "holds model.safetensors and model.safetensors.index.json, which names other files; expected one of"
    if what == "twice":
        names = ["a.safetensors", "b.safetensors"]
        for name in names:
            save_file(tensors, folder / name)
        weights.unlink()
        places = dict(zip(tensors, names * len(tensors), strict=False))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return "hf: lm_head.weight is in a.safetensors and in b.safetensors; expected it once"
    if what == "unfinished":
        (folder / LIST).write_text("")
        return "hf: an export that has not ended; expected a whole one"
    if what == "other width":
        described.write_text(json.dumps({**said, "hidden_size": 128}))
        return "config.json: hidden_size is 128, and by "
    if what == "other RoPE":
        described.write_text(json.dumps({**said, "rope_theta": 5e5, "rope_parameters": None}))
        return "config.json: rope_theta of its RoPE is 500000.0, and by the config 10000.0"
    if what == "other class":
        described.write_text(json.dumps({**said, "model_type": "mamba"}))
        return "config.json: model_type is 'mamba', and by "
    if what == "no JSON":
        described.write_text("{")
        return "config.json: damaged ("
    if what == "cut":
        weights.write_bytes(weights.read_bytes()[:5000])
        return "model.safetensors: damaged ("
    if what == "pickles":
        weights.rename(folder / "pytorch_model.bin")
        return "no model.safetensors is here; expected weights in safetensors"
    if what == "missing":
        del tensors["lm_head.weight"]
        save_file(tensors, weights)
        return "lm_head.weight is missing"
    if what == "shape":
        save_file({**tensors, "model.norm.weight": torch.ones(3)}, weights)
        return "model.norm.weight is of shape [3]; expected [64] by the config"
    if what == "more":
        save_file({**tensors, "model.layers.0.extra": torch.ones(3)}, weights)
        return "holds model.layers.0.extra, which LlamaForCausalLM of this config does not have"
    shutil.rmtree(folder)
    return "no such folder; expected one of Hugging Face, or a checkpoint of megatron.training"


DAMAGES = (
    *("other width", "other RoPE", "other class", "no JSON", "cut", "pickles", "missing", "shape", "more", "gone"),
    *("scaled RoPE", "shard gone", "shard cut", "shard elsewhere", "unfinished", "two kinds", "twice", *LIES),
    *CONTRADICTIONS,
    *BAD_NUMBERS,
)


@pytest.fixture(scope="module")
def exported(trained: Callable[[str], Trained], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "hf"
    export_hugging_face(trained("llama, untied").source, folder)
    return folder


def refused(one: Trained, folder: Path, capfd: pytest.CaptureFixture[str], *options: str) -> str:
    """One sentence and exit status 2; no file is left where the run would be."""
    run = folder.with_name("run")
    path = folder.with_name("run.yaml")
    path.write_text(yaml.safe_dump(config_for(one, run).model_dump()))
    capfd.readouterr()  # what the ranks said that have trained it
    assert cli.run(["import", str(folder), str(path), *options]) == 2
    *before, said = capfd.readouterr().err.strip().splitlines()
    assert all("SentencePiece" in line or " tokens of " in line for line in before), before  # data that is prepared
    assert not list(run.rglob("*"))
    return said


@pytest.mark.parametrize("what", DAMAGES)
def test_what_is_refused(
    trained: Callable[[str], Trained],
    exported: Path,
    what: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Whatever is said about it, not by its checksums alone."""
    shutil.copytree(exported, tmp_path / "hf")
    (tmp_path / "hf" / SUMS).unlink()
    sentence = damage(tmp_path / "hf", what)
    assert sentence in refused(trained("llama, untied"), tmp_path / "hf", capfd)


def flip_a_bit(folder: Path) -> str:
    """In the last number of the last tensor, far from the header."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)
    return "hf: model.safetensors does not match its checksum; expected the files that SHA256SUMS was written for"


def swap_two_tensors(folder: Path) -> str:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    one, other = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    save_file({**tensors, one: tensors[other], other: tensors[one]}, path, {"format": "pt"})
    return "hf: model.safetensors does not match its checksum"


def unlist_the_weights(folder: Path) -> str:
    lines = (folder / SUMS).read_text().splitlines(keepends=True)
    (folder / SUMS).write_text("".join(line for line in lines if "model.safetensors" not in line))
    return "hf: model.safetensors is not in SHA256SUMS; expected a checksum of every file that is read"


def another_config(folder: Path) -> str:
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    return "hf: config.json does not match its checksum"


def lose_a_file(folder: Path) -> str:
    (folder / "tokenizer.model").unlink()
    return "hf: tokenizer.model is missing; expected the files that SHA256SUMS was written for"


def cut_the_sums(folder: Path) -> str:
    (folder / SUMS).write_bytes(b"\xff")
    return "SHA256SUMS: damaged; expected lines of sha256sum"


@pytest.mark.parametrize(
    "change", [flip_a_bit, swap_two_tensors, unlist_the_weights, another_config, lose_a_file, cut_the_sums]
)
def test_checksums_beside_it(
    trained: Callable[[str], Trained],
    exported: Path,
    change: Callable[[Path], str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Our own export's, which say what no reading of the files could: these are valid weights, and others."""
    folder = shutil.copytree(exported, tmp_path / "hf")
    sentence = change(folder)
    assert sentence in refused(trained("llama, untied"), folder, capfd)


def test_checksums_beside_a_megatron_checkpoint(
    trained: Callable[[str], Trained], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also `export --to megatron` writes them; transformers does not read such a source, which one line says."""
    one = trained("llama, untied")
    export_megatron(one.source, tmp_path / "source")
    lines: list[str] = []
    said = import_checkpoint(tmp_path / "source", config_for(one, tmp_path / "good"), lines.append)
    assert (said["step"], said["deviation"]) == (0, None)
    assert lines[-1:] == ["logits are not compared: transformers does not read checkpoints of Megatron"]
    shard = max((tmp_path / "source" / "release").glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    sentence = f"source: release/{shard.name} does not match its checksum; expected the files that SHA256SUMS was"
    assert sentence in refused(one, tmp_path / "source", capfd)


def test_without_transformers(
    trained: Callable[[str], Trained],
    exported: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The two places of RoPE's base must agree all the same; that nothing was compared is said in one line."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    one, folder = trained("llama, untied"), shutil.copytree(exported, tmp_path / "hf")
    lines: list[str] = []
    said = import_checkpoint(folder, config_for(one, tmp_path / "good"), lines.append)
    assert said["deviation"] is None
    assert lines[-1:] == ["logits are not compared: transformers is not installed"]
    (folder / SUMS).unlink()
    sentence = damage(folder, "RoPE's base in two places")
    assert sentence in refused(one, folder, capfd)


DEFAULTS = {
    # What is not said is transformers' own, 1e-6 and plain RoPE with the base 10,000.
    "rms_norm_eps": (None, "rms_norm_eps is 1e-06, and by "),
    "partial_rotary_factor": (0.5, "partial_rotary_factor of its RoPE is 0.5, and by the config 1.0"),
    "max_position_embeddings": ("128", "config.json: transformers {version} does not take it (StrictDataclassFieldVal"),
}


@pytest.mark.parametrize("key", DEFAULTS)
def test_what_transformers_reads_counts(
    trained: Callable[[str], Trained], exported: Path, key: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(exported, tmp_path / "hf")
    (folder / SUMS).unlink()
    said = json.loads((folder / "config.json").read_text())
    del said["rope_theta"], said["rope_parameters"]  # or the key stands there a second time
    value, sentence = DEFAULTS[key]
    said = {name: each for name, each in {**said, key: value}.items() if each is not None or name != key}
    (folder / "config.json").write_text(json.dumps(said))
    sentence = sentence.format(version=importlib.metadata.version("transformers"))
    assert sentence in refused(trained("llama, untied"), folder, capfd)


def test_logits_are_compared(
    trained: Callable[[str], Trained],
    exported: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A factor that falls on the wrong rows is seen by nothing else; with `--no-check` nothing is compared."""
    one = trained("llama, untied")
    good = import_checkpoint(exported, config_for(one, tmp_path / "good"))
    assert 0 < good["deviation"] < 1e-5

    def without_query(parametrization: Parametrization) -> dict[str, Any]:
        return {name: factors for name, factors in fold(parametrization).items() if "linear_qkv" not in name}

    monkeypatch.setattr(hugging_face, "fold", without_query)
    keys = {"training.train_steps": 3}  # under its own base, which multiplies queries
    config = config_for(one, tmp_path / "run", **keys)
    with pytest.raises(
        UserError, match=r"by (\d\.\de-0[12]) of the largest; expected at most 1e-04 \(--no-check"
    ) as found:
        import_checkpoint(exported, config)
    assert "hf: logits of the imported model differ from those of transformers" in str(found.value)
    assert not list((tmp_path / "run").rglob("*"))
    assert import_checkpoint(exported, config, check=False)["deviation"] is None


def test_too_large_for_this_machine(
    trained: Callable[[str], Trained], exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """384 rows of 64 in and out, two layers of 64 x (192 + 96 + 288 + 144), five norms: 141,632 weights at 5 bytes."""
    monkeypatch.setattr("mup_megatron.convert.importing.check._free_memory", lambda _device: 10_000)
    lines: list[str] = []
    said = import_checkpoint(exported, config_for(trained("llama, untied"), tmp_path / "run"), lines.append)
    assert said["deviation"] is None
    assert lines[-1] == "logits are not compared: they take 0.7 MB of memory, and 0.0 MB are free"


def test_a_head_beside_a_tied_embedding(
    trained: Callable[[str], Trained], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Some versions of transformers write it; another one would be lost."""
    one = trained("gpt3, tied")
    export_hugging_face(one.source, tmp_path / "hf")
    (tmp_path / "hf" / SUMS).unlink()
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    head = tensors["transformer.wte.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, path, {"format": "pt"})
    assert import_checkpoint(tmp_path / "hf", config_for(one, tmp_path / "good"))["deviation"] < 1e-5
    head[7, 7] += 1
    save_file({**tensors, "lm_head.weight": head}, path, {"format": "pt"})
    sentence = "lm_head.weight is another tensor than transformer.wte.weight; expected the same, or no tied head"
    assert sentence in refused(one, tmp_path / "hf", capfd)


def test_a_run_that_is_there(trained: Callable[[str], Trained], exported: Path, tmp_path: Path) -> None:
    config = config_for(trained("llama, untied"), tmp_path / "run")
    import_checkpoint(exported, config)
    with pytest.raises(UserError, match=r"step_00000000 is there already; expected a run\.dir without checkpoints"):
        import_checkpoint(exported, config)


@pytest.mark.slow
def test_a_full_disk(trained: Callable[[str], Trained], exported: Path, tmp_path: Path) -> None:
    """One sentence, and no checkpoint of which a part is there."""
    disk = Disk(tmp_path / "disk", 400)
    try:
        config = config_for(trained("llama, untied"), disk.path / "run")
        with pytest.raises(DiskFull, match=r"no space left on device while writing the checkpoint \(\d"):
            import_checkpoint(exported, config)
        assert not (disk.path / "run" / "checkpoints").exists()
    finally:
        subprocess.run(["umount", "-l", str(disk.path)], check=True)

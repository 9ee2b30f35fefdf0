"""Damaged sources of import, by the hundred: refused in one sentence, or imported as exactly what stands there.

`./dev test --all` takes many times as many; the seed and the counts stand in its summary.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from mup_megatron import cli
from mup_megatron.checkpoints.checkpoint import SUMS
from mup_megatron.convert.export import export_hugging_face, open_source
from mup_megatron.convert.importing import import_checkpoint
from tests.convert.sources import Trained, deviation, own_logits
from tests.convert.test_hugging_face import logits
from tests.convert.test_importing import config_for
from tests.helpers.damage import bytes_of, data_of, draws

pytestmark = [pytest.mark.more, pytest.mark.usefixtures("one_thread")]
Damage = Callable[[Path, random.Random], None]


def a_file(folder: Path, draw: random.Random) -> None:
    """Bytes of any file, most often of those that are read."""
    read = [path for path in folder.iterdir() if path.suffix == ".safetensors" or path.name == SUMS]
    path = draw.choice([*sorted(read), *sorted(folder.iterdir())])
    path.write_bytes(bytes_of(path.read_bytes(), draw))


def a_json(folder: Path, draw: random.Random) -> None:
    """A value in a file of JSON, most often in config.json."""
    path = draw.choice([folder / "config.json", *sorted(folder.glob("*.json"))])
    path.write_text(json.dumps(data_of(json.loads(path.read_text()), draw)))


def a_header(folder: Path, draw: random.Random) -> None:
    """What a file of tensors says of them: names, dtypes, shapes, places. Its length is right, or it is not."""
    path = draw.choice(sorted(folder.glob("*.safetensors")))
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    if draw.random() < 0.5:
        header = data_of(header, draw)
    else:
        name = draw.choice(sorted(header))
        header[name] |= {"dtype": draw.choice(["I32", "F16", "F64", "U8", "BF16", "F8_E4M3", "C64", "f32"])}
    text = json.dumps(header).encode()
    length = len(text) + draw.choice((0, 0, 0, 0, 1, -1, 2**40))
    path.write_bytes(length.to_bytes(8, "little") + text + content[end:])


def tensors(folder: Path, draw: random.Random) -> None:
    """Whole tensors: swapped, of other numbers, another dtype or shape, lost, too many."""
    path = draw.choice(sorted(folder.glob("*.safetensors")))
    held = load_file(path)
    name, other = draw.choice(sorted(held)), draw.choice(sorted(held))
    kind = draw.choice(("swap", "number", "dtype", "shape", "lost", "more", "renamed"))
    if kind == "swap":
        held[name], held[other] = held[other], held[name]
    elif kind == "number":
        held[name].view(-1)[draw.randrange(held[name].numel())] = draw.choice((torch.nan, torch.inf, 0.5, 1e-40, 1e30))
    elif kind == "dtype":
        held[name] = held[name].to(draw.choice((torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool)))
    elif kind == "shape":
        held[name] = draw.choice((held[name][None], held[name][:-1], held[name].flatten())).contiguous()
    elif kind == "more":
        held[f"{name}.more"] = held[name].clone()
    else:
        tensor = held.pop(name)
        if kind == "renamed":
            held[draw.choice((other, name.replace("0", "1"), "", "lm_head.weight"))] = tensor
    save_file({key: tensor.clone() for key, tensor in held.items()}, path, {"format": "pt"})


def names(folder: Path, draw: random.Random) -> None:
    """A file is gone, or under another's name."""
    one, other = draw.sample(sorted(folder.iterdir()), 2)
    if draw.random() < 0.5:
        one.unlink()
    else:
        one.replace(other)


DAMAGES: tuple[Damage, ...] = (a_file, a_json, a_header, tensors, names)


@pytest.fixture(scope="module")
def sources(trained: Callable[[str], Trained], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One file of weights, and several with their index."""
    folder = tmp_path_factory.mktemp("sources")
    one = trained("llama, untied")
    export_hugging_face(one.source, folder / "one")
    export_hugging_face(one.source, folder / "several", max_shard_size=200_000)
    import_checkpoint(folder / "one", config_for(one, folder / "run"))  # which prepares the data
    return [folder / "one", folder / "several"]


def is_exact(folder: Path, run: Path) -> None:
    """The imported weights are the folder's to the last bit (an oracle of its own reads them), the logits too."""
    source = open_source(run)
    export_hugging_face(source, run / "again")
    found = load_file(run / "again" / "model.safetensors")
    expected: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        expected |= load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].float()) for name in found)
    assert deviation(own_logits(source), logits(folder)) < 1e-4


def test_damaged_sources(
    request: pytest.FixtureRequest,
    trained: Callable[[str], Trained],
    sources: list[Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With our own checksums beside them every change of a file that they list is seen; without, what matters is."""
    config: dict[str, Any] = config_for(trained("llama, untied"), tmp_path / "run").model_dump()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    imported = {True: 0, False: 0}
    refused = {True: 0, False: 0}
    for draw in draws(request, 15, 100):
        folder = shutil.copytree(draw.choice(sources), tmp_path / "hf")
        if listed := draw.random() < 0.2:
            before = {path.name: path.read_bytes() for path in folder.iterdir()}
        else:
            (folder / SUMS).unlink()
        draw.choice(DAMAGES)(folder, draw)
        capfd.readouterr()
        status = cli.run(["import", str(folder), str(tmp_path / "run.yaml")])
        err = capfd.readouterr().err
        assert status in (0, 2), err
        if status:
            (said,) = err.splitlines()
            assert said.startswith("mup-megatron: error: ")
            assert said.isprintable()
            assert len(said) < 2200
            assert str(folder) in said, said
            assert not list((tmp_path / "run").rglob("*"))
            refused[listed] += 1
        else:
            if listed and (folder / SUMS).is_file():
                assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
            is_exact(folder, tmp_path / "run")
            shutil.rmtree(tmp_path / "run")
            imported[listed] += 1
        shutil.rmtree(folder)
    assert refused[False]
    assert imported[False]

"""export --to hf of BERT and T5: transformers' MegatronBert and Blenderbot are the oracle."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from mup_megatron import cli
from mup_megatron.config import Config
from mup_megatron.convert.export import Source, export_hugging_face, export_safetensors, open_source
from mup_megatron.convert.export.fold import fold
from mup_megatron.convert.export.hugging_face import architecture_of
from mup_megatron.data.t5 import pair_masks
from mup_megatron.evaluate.generate import generate
from mup_megatron.evaluate.masks import fill
from mup_megatron.parallel import upstream
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import ConfigError
from tests.convert.sources import MULTIPLIERS, TOKENS, config_of, deviation, own_model, train
from tests.helpers.configs import VOCABULARY, make_t5
from tests.helpers.distributed import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
SOURCES, TARGETS = TOKENS[:, :30], TOKENS[:, 30:50]
PADS = 3  # of the second source


def bert(tied: bool = True, **keys: Any) -> Config:
    return config_of("bert", tied, **keys)


def t5(tied: bool = True, **keys: Any) -> Config:
    of_one_stack = {key: value for key, value in MULTIPLIERS.items() if key.startswith("hparams")}
    given = {
        **of_one_stack,
        "model__share_embeddings_and_output_weights": tied,
        "hparams__init_method_std": 0.15,
        "training__train_steps": 3,
        "training__lr_warmup_steps": 1,
        "training__checkpoint_interval": 3,
        "parallel__tensor_model_parallel_size": 1,
    }
    return make_t5(**{**given, **keys})


MODELS = {
    "bert": (bert(), "PP 2"),
    "bert, pairs": (bert(model__bert_binary_head=True), "TP 2"),
    "bert, untied": (bert(tied=False), "ZeRO 1"),
    "t5": (t5(), "TP 2"),
    "t5, untied": (t5(tied=False), "ZeRO 3"),
    "t5, no biases": (t5(model__add_bias_linear=False), "one rank"),
    "t5, no gains": (t5(model__norm_gains="none"), "one rank"),
}
QUICK = ("bert, pairs", "t5")
CLASSES = {
    "bert": "MegatronBertForMaskedLM",
    "bert, pairs": "MegatronBertForPreTraining",
    "bert, untied": "MegatronBertForMaskedLM",
}


@pytest.fixture(scope="module")
def sources(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checkpoint of a model, by its name in MODELS; each is trained once."""
    made: dict[str, Source] = {}

    def opened(name: str) -> Source:
        if name not in made:
            upstream.prepare_process()
            config, layout = MODELS[name]
            made[name] = open_source(train(ranks, tmp_path_factory.mktemp("encoders"), config, layout))
        return made[name]

    return opened


def masks() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which tokens of the sources are there, and what megatron-core's T5 takes of it."""
    present = torch.ones_like(SOURCES, dtype=torch.bool)
    present[1, -PADS:] = False
    return present, *pair_masks(present, TARGETS.shape[1])


def own(source: Source, parametrization: Parametrization | None = None) -> dict[str, torch.Tensor]:
    """What the checkpoint's own model computes; logits without what pads the vocabulary."""
    found: dict[str, torch.Tensor] = {}
    with own_model(source, parametrization) as model, torch.no_grad():
        if source.run.config.model.family == "t5":
            found["logits"] = model(SOURCES, TARGETS, *masks()[1:])[..., :VOCABULARY]
            return found
        types = torch.arange(64).expand(4, 64) // 40
        paired = source.run.config.model.bert_binary_head
        logits, binary = model(TOKENS, torch.ones_like(TOKENS), tokentype_ids=types if paired else None)
        found["logits"] = logits[..., : VOCABULARY + 1]
        if paired:
            found["binary"] = binary
    return found


def theirs(folder: Path) -> dict[str, torch.Tensor]:
    """What transformers' model of a folder computes, every tensor of which it knows, and none of which it misses."""
    name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    loader: Any = getattr(transformers, name)
    model, said = loader.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(said.values()), said
    model.eval()
    with torch.no_grad():
        if name.startswith("Blenderbot"):
            present = masks()[0]
            return {"logits": model(input_ids=SOURCES, attention_mask=present.long(), decoder_input_ids=TARGETS).logits}
        if name.endswith("MaskedLM"):
            return {"logits": model(TOKENS).logits}
        answer = model(TOKENS, token_type_ids=torch.arange(64).expand(4, 64) // 40)
        return {"logits": answer.prediction_logits, "binary": answer.seq_relationship_logits}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_the_exported_model_is_the_checkpoints(sources: Any, name: str, tmp_path: Path) -> None:
    source = sources(name)
    said = export_hugging_face(source, tmp_path / "hf")
    assert said["architecture"] == CLASSES.get(name, "BlenderbotForConditionalGeneration")
    mine, other = own(source), theirs(tmp_path / "hf")
    assert mine.keys() == other.keys()
    for key, value in mine.items():
        assert deviation(other[key], value) < 1e-5, key
    assert float(mine["logits"].std()) > 0.5  # which the four multipliers, and 1e-5, are told from


NEUTRAL = {"softmax_scale": None, "readout": 1.0, "embedding": 1.0, "residual": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("multiplier", NEUTRAL)
@pytest.mark.parametrize("name", ["bert, pairs", "t5"])
def test_a_multiplier_left_out_is_seen(sources: Any, name: str, multiplier: str, tmp_path: Path) -> None:
    """The logits are others, by far; and they are those of the checkpoint without this multiplier."""
    source = sources(name)
    neutral = NEUTRAL[multiplier] or source.run.config.model.head_size**-0.5
    without = source.parametrization.replaced(None, **{multiplier: neutral})
    export_hugging_face(dataclasses.replace(source, parametrization=without), tmp_path / "hf")
    found = theirs(tmp_path / "hf")["logits"]
    assert deviation(found, own(source)["logits"]) > 1e-3
    assert deviation(found, own(source, without)["logits"]) < 1e-5


def test_where_a_tied_readout_goes(sources: Any) -> None:
    """BERT's norm before the readout is its head's own; the readout's bias takes no factor, nor does the last norm."""
    factors = fold(sources("bert, pairs").parametrization)
    # Hidden 96 over 48: A = 1/2, times 3, and the tied head has taken 0.3.
    assert factors["lm_head.layer_norm.weight"] == {None: pytest.approx(5.0)}
    assert factors["lm_head.layer_norm.bias"] == {None: pytest.approx(5.0)}
    assert not {"output_layer.bias", "encoder.final_layernorm.weight"} & factors.keys()
    factors = fold(sources("t5").parametrization)
    assert "encoder.final_layernorm.weight" not in factors
    # Head size 12 over 8: sqrt(8)/12 · 1.75 over 1/sqrt(12).
    query = 1.75 * (8 / 12) ** 0.5
    assert list(factors["decoder.layers.1.cross_attention.linear_q.weight"].values()) == [pytest.approx(query)]


def test_transformers_fills_the_same_masks(sources: Any, tmp_path: Path) -> None:
    """Its tokenizer knows the mask and puts a text, or a pair, between ends; its pipeline says what `generate` says."""
    source = sources("bert, pairs")
    export_hugging_face(source, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    own_tokens, end = source.run.tokenizer.tokenize, int(source.run.tokenizer.eod)
    text = "def [MASK](self):"
    assert tokenizer(text)["input_ids"] == [end, *own_tokens("def"), VOCABULARY, *own_tokens("(self):"), end]
    pair = tokenizer("a b", "c")
    first, second = own_tokens("a b"), own_tokens("c")
    assert pair["input_ids"] == [end, *first, end, *second, end]
    assert pair["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    said = transformers.pipeline("fill-mask", str(tmp_path / "hf"), top_k=3)(text)
    with own_model(source) as model:
        (mine,) = fill(model, source.run.tokenizer, text, candidates=3).masks
    assert [each["token"] for each in said] == [each.id for each in mine]
    # transformers' softmax is over the mask, too.
    assert [each["score"] for each in said] == pytest.approx([each.probability for each in mine], rel=0.2)


def test_an_encoder_decoder_generates(sources: Any, tmp_path: Path) -> None:
    """transformers' greedy text is that of `generate`."""
    export_hugging_face(sources("t5"), tmp_path / "hf")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = sources("t5").run.tokenizer
    source = [*tokenizer.tokenize("import sys"), int(tokenizer.eod)]
    said = model.generate(torch.tensor([source]), max_new_tokens=12, do_sample=False)[0].tolist()
    with own_model(sources("t5")) as own_one:
        mine = [token.id for token in generate(own_one, tokenizer, "import sys", max_new_tokens=12)]
    assert said[0] == int(tokenizer.eod)
    assert said[1:] == mine


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_safetensors_have_every_tensor(sources: Any, name: str, tmp_path: Path) -> None:
    source = sources(name)
    export_safetensors(source, tmp_path / "plain")
    found = load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == source.parametrization.shapes.keys()


def test_the_heads_gelu_of_a_run_on_gpus(sources: Any, tmp_path: Path) -> None:
    """The class has one activation for layers and head; who exports such a run is told, and others are not."""
    source, said = sources("bert, pairs"), list[str]()
    export_hugging_face(source, tmp_path / "cpu", say=said.append)
    assert not said
    on_cuda = source.run.manifest.replaced(fused_activation=True)
    run = dataclasses.replace(source.run, manifest=on_cuda)
    export_hugging_face(dataclasses.replace(source, run=run), tmp_path / "cuda", say=said.append)
    assert [line.partition(":")[0] for line in said] == ["warning"]
    assert "GELU" in said[0]
    assert transformers.AutoConfig.from_pretrained(tmp_path / "cuda").hidden_act == "gelu_new"


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (bert(model__position_embedding_type="rope"), "MegatronBertForMaskedLM does not have"),
        (t5(model__position_embedding_type="relative"), "positions relative, which Blenderbot"),
        (t5(model__normalization="RMSNorm"), "RMSNorm, which Blenderbot"),
        (t5(model__layernorm_epsilon=1e-6), "norms with the epsilon 1e-06, which Blenderbot"),
    ],
)
def test_what_no_class_computes_is_refused(config: Config, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        architecture_of(config, keep_multipliers=False)


def test_no_multipliers_are_kept(sources: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(sources("t5").run.path)
    assert cli.run(["export", path, str(tmp_path / "kept"), "--keep-multipliers"]) == 2
    assert "BlenderbotForConditionalGeneration has no multipliers of its own" in capfd.readouterr().err
    assert cli.run(["export", path, str(tmp_path / "kept"), "--to", "megatron"]) == 2
    assert "export --to megatron needs a model that predicts the next token" in capfd.readouterr().err
    assert not (tmp_path / "kept").exists()

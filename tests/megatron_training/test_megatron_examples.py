"""Megatron-LM's own examples as users of µP: every word as the script hands it over, but for what `CHANGED` lists."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from mup_megatron.util.errors import UserError
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training
from tests.megatron_training.test_megatron_elsewhere import DATA, elsewhere
from tests.megatron_training.test_megatron_recipes import FROM_HIDDEN, small, trains

pytestmark = needs_training
GPT3, GPT_OSS, LLAMA3, DEEPSEEK_FSDP, LLAMA3_FSDP, MIXTRAL = (
    "gpt3/train_gpt3_175b_distributed.sh",
    "gptoss/02_train.sh",
    "llama/train_llama3_8b_h100_fp8.sh",
    "megatron_fsdp/sbatch_mfsdp_deepseek_v3.sh",
    "megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh",
    "mixtral/train_mixtral_8x7b_distributed.sh",
)
SCHEDULE = ("0:16", "2.4B:320", "4.8B:624", "7.2B:928", "9.6B:1232", "12B:1536")
# What had to be changed, with what upstream itself says to the words as they are published.
CHANGED: dict[str, list[tuple[tuple[str, ...], tuple[str, ...], str]]] = {
    GPT3: [
        # ${TRAINING_ARGS[@]} without quotes is split at the blanks of the schedule.
        (SCHEDULE, (" ".join(SCHEDULE),), "unrecognized arguments: 2.4B:320"),
        # Upstream takes the batch that the schedule ends with.
        (("--global-batch-size", "1536"), (), "Cannot specify both --step-batch-size-schedule and --global-batch-size"),
    ],
    GPT_OSS: [
        # Options that Megatron-LM's modelopt examples add.
        (("--export-force-local-attention",), (), "unrecognized arguments: --export-force-local-attention"),
        (("--enable-gpt-oss",), (), "--enable-gpt-oss"),
        # Its 12 layers cannot be shared out over its 8 stages.
        (
            ("--pipeline-model-parallel-size", "8"),
            ("--pipeline-model-parallel-size", "4"),
            "divisible by the pipeline-model-parallel size",
        ),
    ],
}
# What a run refuses all the same, of options that change no row of the table.
REFUSED_IN_A_RUN = {
    GPT_OSS: ["--fp8-param-gather"],
    LLAMA3: ["--fp8-param-gather"],
    DEEPSEEK_FSDP: ["--init-model-with-meta-device"],
    LLAMA3_FSDP: ["--init-model-with-meta-device", "--fp8-param-gather"],
}


def published() -> dict[str, list[str]]:
    """Words by example."""
    found = {}
    for paragraph in (DATA / "examples_0.19.0.txt").read_text().split("\n\n")[1:]:
        name, *lines = paragraph.splitlines()
        found[name.removeprefix("## ")] = shlex.split(" ".join(lines))
    return found


def changed(name: str, count: int | None = None) -> list[str]:
    """The words of an example with the first changes of `CHANGED` made; None makes all."""
    words = published()[name]
    for before, after, _ in CHANGED.get(name, [])[:count]:
        at = next(at for at in range(len(words)) if tuple(words[at : at + len(before)]) == before)
        words[at : at + len(before)] = after
    return words


# What a CPU has not, beside what recipes use of it.
CUDAS = {
    *("moe-permute-fusion", "moe-token-dispatcher-type", "moe-flex-dispatcher-backend"),
    *(
        "log-params-norm",
        "log-num-zeros-in-grad",
        "empty-unused-memory-level",
        "profile",
        "profile-step-start",
        "profile-step-end",
    ),
    # Upstream makes the mask on CUDA, and recomputes a norm or an MLP with Transformer Engine alone.
    *("no-create-attention-mask-in-dataloader", "recompute-granularity", "recompute-modules"),
    *("fp8-param-gather", "fp8-amax-compute-algo", "fp8-amax-history-len", "transformer-impl", "use-flash-attn"),
    *("use-megatron-fsdp", "init-model-with-meta-device", "data-parallel-sharding-strategy", "use-nccl-ub"),
    *("fsdp-double-buffer", "fsdp-manual-registration", "ckpt-format"),
    *("megatron-fsdp-grad-comm-dtype", "megatron-fsdp-main-grads-dtype"),
}


DATA_OPTIONS = "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000"
EXAMPLES = list(published())


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_explained(name: str, tmp_path: Path) -> None:
    """From half the hidden size: what reads hidden vectors gets half the rate; the embedding does not."""
    words = changed(name)
    base = {"hidden_size": int(words[words.index("--hidden-size") + 1]) // 2}
    config, parametrization, _, refused = elsewhere(words, tmp_path, base, common=DATA_OPTIONS)
    tensors = parametrization.tensors
    read = {name: tensor.lr_multiplier for name, tensor in tensors.items() if name.endswith(FROM_HIDDEN)}
    assert read
    assert set(read.values()) == {0.5}
    assert tensors["embedding.word_embeddings.weight"].lr_multiplier == 1
    assert [sentence.split(":")[0] for sentence in refused] == REFUSED_IN_A_RUN.get(name, [])
    if "--split" in words:
        assert config.data.split == words[words.index("--split") + 1].strip("'")


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name in CHANGED for number in range(len(CHANGED[name]))]
)
def test_a_change_is_needed(name: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without it upstream's own parser, or its own checks, refuse the example."""
    words, said = changed(name, number), CHANGED[name][number][2]
    base = {"hidden_size": int(words[words.index("--hidden-size") + 1]) // 2}
    with pytest.raises((SystemExit, UserError)) as error:
        elsewhere(words, tmp_path, base, common=DATA_OPTIONS)
    assert said in capsys.readouterr().err + str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_small_copy_of_an_example_trains(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """One process, two steps, with the words that a CPU can obey."""
    options: dict[str, str | None] = {**small(changed(name)), "log-interval": "1"}
    if "step-batch-size-schedule" in options:
        options |= {"step-batch-size-schedule": "0:2 32:4", "global-batch-size": None}
    if "train-samples" in options:
        options |= {"train-samples": "8", "lr-decay-samples": "8", "lr-warmup-samples": None, "train-iters": None}
    trains({option: value for option, value in options.items() if option not in CUDAS}, ranks, tmp_path)


@pytest.mark.parametrize(("typed", "read"), [("'99,1,0'", "99,1,0"), ('"99, 1"', "99,1"), ("949,50,1", "949,50,1")])
def test_a_split_is_its_numbers(typed: str, read: str, tmp_path: Path) -> None:
    """As upstream's dataset takes it (`parse_and_normalize_split`)."""
    from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split

    words = ["--hidden-size", "128", "--num-attention-heads", "4", "--split", typed]
    config = elsewhere(words, tmp_path)[0]
    assert config.data.split == read
    assert parse_and_normalize_split(typed) == parse_and_normalize_split(read)


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="needs MEGATRON_LM, a git repository of Megatron-LM")
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("tree", ["core_v0.19.0", "d98e8a64ddf34856e74b24714e3bedb2f5a39553"])
def test_the_words_are_the_scripts(tree: str, name: str, tmp_path: Path) -> None:
    """What bash makes of the script, with programs in the place of its launchers that say what they are given."""
    command = ["git", "-C", os.environ["MEGATRON_LM"], "show", f"{tree}:examples/{name}"]
    (tmp_path / "example.sh").write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)
    programs = tmp_path / "programs"
    programs.mkdir()
    said = tmp_path / "said"
    say = f"#!{shutil.which('bash')}\nprintf '%s\\0' \"$@\" > {said}\n"
    job = f'#!{shutil.which("bash")}\nwhile [ "$1" != -c ]; do shift; done\nexec bash -c "$2"\n'
    stand_ins = dict.fromkeys(("torchrun", "python", "uv"), say) | {"sbatch": "#!/bin/sh\nexec bash\n", "srun": job}
    for program, text in {**stand_ins, "git": "#!/bin/sh\n"}.items():
        (programs / program).write_text(text)
        (programs / program).chmod(0o755)
    (tmp_path / "pretrain_gpt.py").touch()
    (tmp_path / "there").mkdir()
    places = {GPT_OSS: ["--checkpoint-path", "there"], GPT3: ["a", "b", "c", "d", "e"], MIXTRAL: ["a", "b", "c"]}
    environ = {"PATH": f"{programs}:/usr/bin:/bin", "MEGATRON_PATH": ".", "HOME": str(tmp_path)}
    run = ["bash", "example.sh", *places.get(name, [])]
    result = subprocess.run(run, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    words = said.read_text().split("\0")[:-1]
    words = words[1 + next(at for at, word in enumerate(words) if word.endswith("pretrain_gpt.py")) :]
    assert without_places(words) == published()[name]


PLACES = {
    *("data-path", "vocab-file", "merge-file", "tokenizer-model", "tokenizer-type", "data-cache-path", "save", "load"),
    *("tensorboard-dir", "vocab-size", "mock-data", "wandb-project", "wandb-exp-name"),
}


def without_places(words: list[str]) -> list[str]:
    """Without what names data, tokenizers and folders."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word.removeprefix("--") in PLACES
        if not dropping:
            kept.append(word)
    return kept

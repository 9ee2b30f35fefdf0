"""`python -m tests.helpers.development_tree TREE FOLDER ARGS...`: the small model at its base, in µP and then plainly.

TREE is a Megatron-LM checkout, whose `megatron/` is imported in the place of the installed one. FOLDER/seen.json gets
its version and, of both runs, what was said and the loss of every micro-batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

BASE = "hidden_size: 64\nnum_attention_heads: 4\nffn_hidden_size: 128\n"


def main(tree: Path, folder: Path, extra: list[str]) -> None:
    sys.path.insert(0, str(tree))
    import megatron.core

    from mup_megatron.parallel.ranks import Rank
    from tests.helpers import megatron_runs

    assert Path(megatron.core.__file__).is_relative_to(tree)
    rank = Rank(rank=0, world_size=1, local_rank=0, launched=True)
    words = megatron_runs.words(folder, *extra, base=BASE, train_iters=3, clip_grad=0)
    ours = megatron_runs.train(rank, words=words)
    plain = {"steps": [], "said": "not run"}
    if ours["status"] == 0:
        plain = megatron_runs.train(rank, words=words, plainly=True, initial=ours["initial"])
    runs = [{name: run[name] for name in ("steps", "said")} for run in (ours, plain)]
    seen = {"version": megatron.core.__version__, "runs": runs}
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])

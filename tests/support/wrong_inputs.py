"""Wrong inputs of commands that would import torch, each with the sentence that answers it before that.

python tests/support/wrong_inputs.py      runs each in a process, and prints its seconds of processor time
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from treepack.data.packed_header import read_header
from treepack.files.directory import RUN
from treepack.files.model_source import VALUE_FILE
from treepack.ingest.options import BuildOptions
from treepack.model.accept.vocabulary import CONFIG_FILE
from treepack.objectives.objective import choose_objective
from treepack.pack.directory import pack_trie
from treepack.pack.options import PackOptions
from treepack.research.predictor.record import FORMAT as VALUES_FORMAT
from treepack.research.predictor.record import HEAD, RECORD
from treepack.research.predictor.record import VERSION as VALUES_VERSION
from treepack.train.options import TrainOptions
from treepack.train.saving.run_record import FORMAT, VERSION, files_sha256
from treepack.trie.directory import build_trie_directory

if not __package__:  # run as a program
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.written_rollouts import write_rollouts

MISSING = "none: no such directory; check the path"
NO_MODEL = "./none: no such file or folder; give the folder of a model, or its name on the hub"
NOT_ON_HUB = "nobody/none: is no folder here, and the Hugging Face hub cannot be reached for a model of this name; "
NOT_ON_HUB += "check the path or the network"
NO_KERNELS = "attention: triton needs a GPU and the tensors are on cpu; use reference, or let auto choose"
NO_GPU = "--device is 'cuda' and torch sees 0 GPUs; expected one of these GPUs, or cpu"
NO_DEVICE = "--device is 'gpu'; expected cpu, cuda or cuda:N"
EXISTS = "data/trie exists; choose another --out or give --overwrite"
IS_TRIE = "data/trie: is a trie; pack it first with: treepack pack data/trie --out PACKED"
CUT = "cut.json: malformed JSON (Expecting ',' delimiter: line 1 column 23 (char 22)); expected a file that "
CUT += "save_pretrained wrote"
SMALL = "small.json: the data holds the token id 7 and the vocabulary ends at 3; use the model whose tokenizer "
SMALL += "made the data"
UNTYPED = "untyped.json: has no model_type; expected the config.json of a causal language model"

ALONE = "--sequence-ranks is 2 and this process is alone; start the ranks with torchrun --nproc-per-node 2 --no-python "
ALONE += "treepack ..."

WRONG_INPUTS = {
    "train none --model m.json --out x": MISSING,
    "train data/trie --model m.json --out x": IS_TRIE,
    "train rollouts.jsonl --model m.json --out x": "rollouts.jsonl: is no packed directory; pack rollouts with: "
    "treepack prepare rollouts.jsonl --out DATA",
    "train torn --model m.json --out x": "torn/part-00000.parquet: is missing; write torn again",
    "train data --model m.json --out data/trie": EXISTS,
    "train data --model m.json --out data/packed": "data/packed exists; choose another --out or give --overwrite",
    "train data --model m.json --out m.json/x": "{folder}/m.json/x: cannot be written (Not a directory); "
    "choose another --out",
    "train data --model ./none --out x": NO_MODEL,
    "train data --model data/trie --out x": "data/trie: contains no model; give a folder with config.json or "
    "adapter_config.json, or a hub name",
    "train data --model nobody/none --out x": NOT_ON_HUB,
    "train data --model m.json --out x --init-from nobody/none": NOT_ON_HUB,
    "train data --model small.json --out x": SMALL,
    "train data --model cut.json --out x": CUT,
    "train data --model mamba.json --out x": "mamba.json: its layers compute a selective scan, which has no form on "
    "trees here; docs/models.md lists the models that treepack trains",
    "train data --model untyped.json --out x": UNTYPED,
    "train data --model m.json --out x --device cpu --attention triton": NO_KERNELS,
    "train data --model m.json --out x --eval none": MISSING,
    "train data --model m.json --out x --merge": "m.json: contains no adapter to train; give --lora-rank for a new one",
    "train data --model m.json --out x --device gpu": NO_DEVICE,
    "train data --model m.json --out x --mix 1,1": "--mix has 2 of 1 shares; give one for each packed directory",
    "train steps steps --mix 1,1 --model m.json --out x": "steps, steps: rows of training steps keep the order of "
    "these steps and cannot be taken in shares; omit --mix, which trains each step on the rows of all directories",
    "train data --model m.json --out x --init-from ./none": NO_MODEL,
    "train data --model m.json --out x --loss grpo": "data/packed: has no term_advantage, which the loss grpo needs; "
    "compute them with `treepack advantages`, or give every rollout an advantage, and pack again",
    "train data --model m.json --out run": "run contains a run that is not complete; continue it with --resume or "
    "replace it with --overwrite",
    "train data --model m.json --out run --resume --rows-per-step 3 --eval data": "run: cannot resume: --eval was not "
    "given when the run started and is given now; --lr was 0.5 when the run started and is 1e-05 now; --rows-per-step "
    "was 8 when the run started and is 3 now; restore them, or start a new --out",
    "train data --model m.json --out old --resume --lr 0.5": "old: cannot resume: --loss-scale was 'dynamic' when "
    "the run started, and this treepack has no such option; continue with treepack 0.1.0, which started it, or start "
    "a new --out",
    "train none --model m.json --verify": MISSING,
    "train data --model m.json --verify --carry 64": "--verify: no compared row has more than 64 tokens, rows hold 64; "
    "give a smaller number to --carry",
    "train data --model m.json --out x --loss opd --teacher ./none": NO_MODEL,
    "train data --model m.json --out x --loss opd --teacher wide.json": "wide.json: its output layer has 200 words and "
    "that of m.json 100; write its likeliest words with `treepack logprobs --column teacher --top-k 64`, and omit "
    "--teacher",
    "train data --model m.json --out x --loss distill --distill 0": "--distill and --teacher-kl are 0, so the loss "
    "distill trains nothing; give one",
    "train data --model m.json --out x --sequence-ranks 2": ALONE,
    "train data --model m.json --out x --expert-ranks 3": "--expert-ranks is 3 and this is one process; "
    "start a multiple of 3 with torchrun, or leave it out, also for --verify",
    "train data --model m.json --out x --offload-checkpoints --checkpoint-layers 0": "--offload-checkpoints offloads "
    "recomputed layers and --checkpoint-layers is 0; omit one",
    "logprobs data --model m.json --out x --sequence-ranks 2": ALONE,
    "logprobs none --model m.json --out x": MISSING,
    "logprobs data/trie --model m.json --out x": IS_TRIE,
    "logprobs data --model m.json --out data/trie": EXISTS,
    "logprobs data --model ./none --out x": NO_MODEL,
    "logprobs data --model small.json --out x": SMALL,
    "logprobs data --model m.json --out x --device gpu": NO_DEVICE,
    "logprobs data --model m.json --out x --device cpu --attention triton": NO_KERNELS,
    "critic none --model m.json --out x": MISSING,
    "critic data/packed --model m.json --out x": "data/packed: is packed already; give the trie that it was packed "
    "from, {folder}/data/trie",
    "critic data --model m.json --out data/trie": EXISTS,
    "critic data --model ./none --out x": NO_MODEL,
    "critic data --model small.json --out x": SMALL,
    "critic data --model m.json --out x": "m.json: has no value_head.safetensors, so it is not a critic; train one "
    "with `treepack train --loss value` or --value-coef",
    "values fit none --model m.json --out x": MISSING,
    "values fit data --model m.json --out data/trie": EXISTS,
    "values fit data --model ./none --out x": NO_MODEL,
    "values fit data --model small.json --out x": SMALL,
    "values fit half --model m.json --out x": "{folder}/half.jsonl:2: has the reward 0.5; TRACE needs 0 for failure or "
    "1 for success in every rollout, so write one of them there and build the trie again",
    "values fit data --model m.json --out x --capacity 1": "a prefix of trajectory 'r0' has 2 tokens and rows hold 1; "
    "give --capacity 2 or more",
    "values fit data --model m.json --out x --segment recorded": "no trajectory has 'segments' in its metadata; "
    "record them or give another --segment",
    "values predict data --values predictor --out x.jsonl --capacity 1": "a prefix of trajectory 'r0' has 2 tokens and "
    "rows hold 1; give --capacity 2 or more",
    "values predict data --values none --out x.jsonl": "none/values.json: cannot be read (No such file or directory); "
    "expected a directory that treepack values fit wrote",
    "rollout none.jsonl --engine m.json --sampler independent --out x.jsonl": "none.jsonl: cannot be read "
    "(No such file or "
    "directory); restore the file or its permissions",
    "rollout data --engine m.json --sampler independent --out x.jsonl": "data: cannot be read (Is a directory); give "
    "a file",
    "build-trie rollouts.jsonl --tokenizer ./none --out x": "./none: no such file or folder; give the folder of a "
    "tokenizer, or its name on the hub",
    "rollout rollouts.jsonl --engine ./none --sampler independent --out x.jsonl": NO_MODEL,
    "rollout rollouts.jsonl --engine untyped.json --sampler independent --out x.jsonl": UNTYPED,
    "rollout rollouts.jsonl --engine m.json --sampler independent --out x.jsonl --reward rewards:three": "rewards:three"
    ": takes (a, b, c); write score(text, fields, *, ids), or TRL's score(completions, **kwargs)",
}
if not import_module("treepack_cli.devices").may_have_gpu():
    WRONG_INPUTS |= {
        "train data --model m.json --out x --attention triton": NO_KERNELS,
        "train data --model m.json --out x --device cuda": NO_GPU,
        "critic data --model m.json --out x --attention triton": NO_KERNELS,
        "rollout rollouts.jsonl --engine m.json --sampler independent --out x.jsonl --device cuda": NO_GPU,
    }
"""The arguments of `treepack` in the folder of `write_inputs`, and the sentence, which has {folder} for its path."""


def write_inputs(folder: Path) -> Path:
    """Write rollouts, their trie and rows, configurations of models, and an unfinished run into `folder`."""
    rollouts = write_rollouts(folder / "rollouts.jsonl")
    data = folder / "data"
    build_trie_directory([str(rollouts)], data / "trie", BuildOptions())
    pack_trie(data / "trie", data / "packed", PackOptions(capacity=64))
    records = rollouts.read_text().splitlines(keepends=True)
    (folder / "half.jsonl").write_text("".join([records[0], records[1].replace('"reward": 1', '"reward": 0.5')]))
    build_trie_directory([str(folder / "half.jsonl")], folder / "half", BuildOptions())
    (folder / "steps.jsonl").write_text("".join(record.replace("{", '{"step": 1, ') for record in records))
    build_trie_directory([str(folder / "steps.jsonl")], folder / "steps-trie", BuildOptions())
    pack_trie(folder / "steps-trie", folder / "steps", PackOptions(capacity=64))
    shutil.copytree(data / "packed", folder / "torn")
    (folder / "torn" / "part-00000.parquet").unlink()
    for name, size in (("m.json", 100), ("small.json", 4), ("wide.json", 200)):
        (folder / name).write_text(json.dumps({"model_type": "qwen3", "vocab_size": size}))
    (folder / "mamba.json").write_text(json.dumps({"model_type": "mamba", "vocab_size": 100}))
    (folder / "critic").mkdir()
    shutil.copy(folder / "m.json", folder / "critic" / CONFIG_FILE)
    (folder / "critic" / VALUE_FILE).touch()
    (folder / "predictor").mkdir()
    shutil.copy(folder / "m.json", folder / "predictor" / CONFIG_FILE)
    hashed = [{"name": HEAD, "bytes": 0, "sha256": "0"}]
    fitted = {"tokenizer": None, "options": {"segment": "turn", "capacity": 64}, "files": hashed}
    values = {"format": VALUES_FORMAT, "version": VALUES_VERSION, **fitted}
    (folder / "predictor" / RECORD).write_text(json.dumps(values))
    (folder / "untyped.json").write_text(json.dumps({"vocab_size": 100}))
    (folder / "rewards.py").write_text("def three(a, b, c):\n    return 1.0\n")
    (folder / "cut.json").write_text('{"model_type": "qwen3"')
    (folder / "run").mkdir()
    options = replace(TrainOptions(), lr=0.5, dtype="fp32", objective=choose_objective("sft"))
    record = {
        "format": FORMAT,
        "version": VERSION,
        "packed_sha256": files_sha256(read_header(data / "packed").manifest["files"]),
        "config_sha256": "0",
        "options": options.fixed_options,
    }
    (folder / "run" / RUN).write_text(json.dumps(record))
    (folder / "old").mkdir()
    removed = {**record, "treepack": "0.1.0", "options": {**options.fixed_options, "loss_scale": "dynamic"}}
    (folder / "old" / RUN).write_text(json.dumps(removed))
    return folder


def main() -> None:
    """Print the seconds of processor time of each wrong input."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_inputs(Path(name))
        for command in WRONG_INPUTS:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(
                [Path(sys.executable).with_name("treepack"), *command.split()],
                cwd=folder,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(f"{seconds:5.2f} s  rc {done.returncode}  treepack {command}")
            print(f"             {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ''}")


if __name__ == "__main__":
    main()

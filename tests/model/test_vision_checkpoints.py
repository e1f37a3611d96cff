"""Vision-language checkpoints: the text half is loaded and trained, and the whole checkpoint is saved."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from support.oracle_model import packed_directory
from support.rank_processes import Case, train_over
from support.refusal import refusal
from support.strategies import make
from support.tiny_families import HAS_RECURRENT
from support.tiny_vision import HUB_NAMES, IMAGE_TOKEN, read_weights, save_vision, tiny_vision, vision_config
from treepack import TreepackError
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.load import load_model
from treepack.model.text_half import choose_config
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.setup.opening import open_run, open_verification
from treepack.train.verification import verify_rows

KINDS = ["qwen2_5_vl", "qwen3_vl_moe", "glm4v", "gemma3", "mistral3", "internvl"]
MORE = ["qwen2_vl", "qwen3_vl", "glm4v_moe", *(["qwen3_5", "qwen3_5_moe"] if HAS_RECURRENT else [])]
VERIFIED = ["qwen2_5_vl", "gemma3"]
OLD_NAMES = {**dict.fromkeys(HUB_NAMES, "hub"), "qwen3_vl_moe": "turned"}
NAMES = [
    *[(kind, OLD_NAMES.get(kind, "saved")) for kind in KINDS],
    ("gemma3", "tied"),
    *[pytest.param(kind, OLD_NAMES.get(kind, "saved"), marks=pytest.mark.slow) for kind in MORE],
    *[pytest.param(kind, "saved", marks=pytest.mark.slow) for kind in OLD_NAMES],
    *[pytest.param(kind, "memory", marks=pytest.mark.slow) for kind in VERIFIED],
]
SMALL_BLIP = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50, "image_size": 16}
OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, steps=1, attention="reference")
TOKENS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = np.random.default_rng(0)
    rollouts = [make(f"t{i}", [1, 2, 3 + i % 2, *generator.integers(5, 49, 6).tolist()]) for i in range(6)]
    return packed_directory(tmp_path_factory.mktemp("data") / "packed", rollouts, capacity=32)


def run(packed: Path, model: Path, out: Path, **changes: Any) -> None:
    for _ in train(open_run(packed, model, replace(OPTIONS, **changes)), out):
        pass


def logits(model: Any) -> torch.Tensor:
    model.set_attn_implementation("eager")
    # A weight in a mapped file may begin at any byte, and a product with it then rounds in another way.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


@pytest.mark.parametrize(("kind", "names"), NAMES)
def test_a_step_changes_only_the_text_half_of_the_checkpoint(
    packed: Path, tmp_path: Path, kind: str, names: str
) -> None:
    source = save_vision(tiny_vision(kind), tmp_path / "source", names)
    run(packed, source, tmp_path / "out")
    before, after = read_weights(source), read_weights(tmp_path / "out")
    assert {name: after[name].shape for name in after} == {name: before[name].shape for name in before}
    equal = {name for name in before if torch.equal(before[name], after[name])}
    vision = {name for name, tensor in before.items() if tensor.dtype == torch.bfloat16}
    buffers = {name for name in before if "e_score_correction_bias" in name}
    assert equal == vision | buffers
    assert all(after[name].dtype == torch.bfloat16 for name in vision)
    for file in ("config.json", "preprocessor_config.json"):
        assert (source / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    whole, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    text = load_model(tmp_path / "out", attention="reference").model
    assert torch.equal(logits(whole), logits(text))


@pytest.mark.parametrize(
    "kind",
    [*VERIFIED, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in VERIFIED)],
)
def test_gradients_equal_those_of_trajectories_alone(packed: Path, tmp_path: Path, kind: str) -> None:
    source = save_vision(tiny_vision(kind), tmp_path / "source")
    checked = open_verification(packed, source, OPTIONS)
    report = verify_rows(checked.loaded, [checked.dataset[0]]).gradients
    assert report.dtype == "float64"
    assert max(report.worst[1], report.loss_error) < 1e-9


def test_the_model_has_only_the_text_half(tmp_path: Path) -> None:
    model = tiny_vision("qwen2_5_vl")
    loaded = load_model(save_vision(model, tmp_path / "source", "hub"))
    names = {name for name, _ in loaded.model.named_parameters()}
    assert names == {name for name, _ in model.named_parameters() if "visual" not in name}
    assert loaded.notes[0].startswith("only the text half of this qwen2_5_vl is loaded")


def test_training_mode_reaches_the_decoder_but_not_what_is_around_it(tmp_path: Path) -> None:
    model = load_model(save_vision(tiny_vision("gemma3"), tmp_path / "source")).model.train()
    assert model.training
    assert all(module.training for module in model.model.language_model.modules())
    assert not model.model.training
    assert not any(module.training for module in model.eval().modules())


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_fits_the_whole_model(packed: Path, tmp_path: Path, merge: bool) -> None:
    model = tiny_vision("gemma3")  # the vision tower has linear layers of the same names: q_proj, k_proj, v_proj
    source = save_vision(model, tmp_path / "source", "hub")
    run(packed, source, tmp_path / "out", lora=LoraOptions(rank=2, merge=merge))
    if merge:
        before, after = read_weights(source), read_weights(tmp_path / "out")
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {name for name in before if re.search(r"language_model.*_proj\.weight", name)}
        assert (tmp_path / "out" / "preprocessor_config.json").exists()
        whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    else:
        whole = PeftModel.from_pretrained(model, str(tmp_path / "out"))
        adapted = [name for name, module in whole.named_modules() if hasattr(module, "lora_A")]
        assert adapted
        assert all("language_model" in name for name in adapted)
        assert len(adapted) == 2 * 7
    text = load_model(tmp_path / "out", attention="reference").model
    assert torch.allclose(logits(whole), logits(text), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_ranks_read_their_shards_and_save_the_whole_checkpoint(packed: Path, tmp_path: Path) -> None:
    kinds = {"qwen2_5_vl": "hub", "qwen3_vl_moe": "turned", "glm4v_moe": "saved", "gemma3": "hub"}
    sources = {kind: save_vision(tiny_vision(kind), tmp_path / kind, names) for kind, names in kinds.items()}
    cases = [Case(kind, packed, source, {"steps": 1}) for kind, source in sources.items()]
    cases.append(Case("adapter", packed, sources["gemma3"], {"steps": 1, "lora": LoraOptions(rank=2)}))
    alone, over = (train_over(size, tmp_path, cases) for size in (0, 2))
    for case in cases:
        expected, actual = (read_weights(Path(runs[case.name]["out"])) for runs in (alone, over))
        assert expected.keys() == actual.keys()
        for name, tensor in expected.items():
            assert torch.allclose(tensor, actual[name], atol=1e-5), name
        assert not any("read the whole model" in note for note in over[case.name]["notes"])


def test_a_finished_run_and_its_checkpoint_are_weights_to_start_from(packed: Path, tmp_path: Path) -> None:
    source = save_vision(tiny_vision("qwen2_vl"), tmp_path / "source", "hub")
    run(packed, source, tmp_path / "first")
    run(packed, source, tmp_path / "second", init_from=str(tmp_path / "first"))
    first, second = read_weights(tmp_path / "first"), read_weights(tmp_path / "second")
    assert not torch.equal(first["lm_head.weight"], second["lm_head.weight"])
    assert torch.equal(first["visual.patch_embed.proj.weight"], second["visual.patch_embed.proj.weight"])


def test_a_model_of_the_hub_is_read_from_the_cache(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model, revision = tmp_path / "models--owner--name", "c0ffee" + 34 * "0"
    source = save_vision(tiny_vision("qwen2_5_vl"), model / "snapshots" / revision, "hub")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(revision)
    for _ in train(open_run(packed, "owner/name", OPTIONS), tmp_path / "out"):
        pass
    assert read_weights(tmp_path / "out").keys() == read_weights(source).keys()
    assert (tmp_path / "out" / "preprocessor_config.json").exists()


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_a_config_file_gives_the_text_half_with_random_weights(packed: Path, tmp_path: Path, kind: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(vision_config(kind).to_json_string())
    opened = open_run(packed, config, OPTIONS)
    assert any(f"only the text half of {kind} is built" in note for note in opened.notes)
    assert not any("vis" in name for name, _ in opened.loaded.model.named_parameters())
    run(packed, config, tmp_path / "out")
    assert load_model(tmp_path / "out").model.config.get_text_config().hidden_size == 32


@pytest.mark.skipif(not HAS_RECURRENT, reason="this version of transformers has other recurrent layers")
def test_layers_for_the_prediction_of_several_tokens_stay_in_the_checkpoint(packed: Path, tmp_path: Path) -> None:
    source = save_vision(tiny_vision("qwen3_5"), tmp_path / "source")
    index = source / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    first = source / min(fields["weight_map"].values())
    predictor = {"mtp.fc.weight": torch.randn(32, 64).bfloat16(), "mtp.norm.weight": torch.randn(32)}
    save_file({**load_file(first), **predictor}, first, metadata={"format": "pt"})
    fields["weight_map"] |= dict.fromkeys(predictor, first.name)
    index.write_text(json.dumps(fields))
    run(packed, source, tmp_path / "out")
    before, after = read_weights(source), read_weights(tmp_path / "out")
    assert before.keys() == after.keys()
    equal = {name for name in before if torch.equal(before[name], after[name])}
    assert equal == {name for name in before if "visual" in name or name.startswith("mtp.")}


def test_checkpoints_that_could_not_be_saved_whole_are_refused(tmp_path: Path) -> None:
    model = tiny_vision("qwen2_5_vl")
    pickled = tmp_path / "pickled"
    model.save_pretrained(pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    assert refusal(load_model, pickled).endswith(
        "its weights are not safetensors; save the model again with transformers"
    )

    partial = save_vision(model, tmp_path / "partial", "hub")
    index = partial / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    del fields["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(fields))
    for path in partial.glob("*.safetensors"):
        tensors = read_weights(partial)
        save_file({n: t for n, t in tensors.items() if fields["weight_map"].get(n) == path.name}, path)
    assert "norm.weight is missing in its weights; expected a whole checkpoint" in refusal(load_model, partial)


def test_rows_with_images_are_refused(packed: Path, tmp_path: Path) -> None:
    source = save_vision(tiny_vision("qwen2_5_vl"), tmp_path / "source")
    with_image = packed_directory(tmp_path / "images", [make("t0", [1, 2, IMAGE_TOKEN, 3])], capacity=32)
    with pytest.raises(TreepackError, match=f"token id {IMAGE_TOKEN}, which is image_token_id of qwen2_5_vl, but only"):
        run(with_image, source, tmp_path / "out")


def test_a_model_without_a_language_model_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("siglip_vision_model").save_pretrained(tmp_path)
    assert "transformers has no causal language model of the type 'siglip_vision_model'" in refusal(
        load_model, tmp_path
    )


def test_a_captioner_without_a_decoder_of_text_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("blip", text_config=SMALL_BLIP, vision_config=SMALL_BLIP)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    assert refusal(load_model, tmp_path).startswith(
        f"{tmp_path}: blip has no text half with embeddings, a decoder and an output"
    )


def test_a_type_that_needs_its_towers_for_text_is_a_text_model(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gemma3n")
    chosen, notes = choose_config(config, tmp_path)
    assert chosen.model_type == "gemma3n_text"
    assert notes == ("only the text half of gemma3n is built: a saved model has no vision tower",)

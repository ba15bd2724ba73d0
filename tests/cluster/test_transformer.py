"""`Transformer.from_config` against the models that transformers builds from the same configurations."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.__main__ import main
from workbench.cluster.analysis.collective_cost import CostError

SIZES = {"num_hidden_layers": 3, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 4096, "max_position_embeddings": 512}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 700}
GPT2 = {"n_layer": 3, "n_embd": 256, "n_head": 8, "vocab_size": 4096, "n_positions": 512}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", GROUPED),
        ("llama", {**GROUPED, "tie_word_embeddings": True}),
        ("mistral", GROUPED | {"head_dim": 32}),
        ("qwen2", GROUPED),
        ("phi3", GROUPED | {"pad_token_id": 0}),
        ("olmo2", GROUPED),
        ("granite", GROUPED),
        ("smollm3", GROUPED | {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}),
        ("gpt_neox", SIZES | {"intermediate_size": 1024}),
        ("gpt2", GPT2),
        ("opt", SIZES | {"ffn_dim": 1024, "word_embed_proj_dim": 256}),
    ],
)
def test_it_has_the_parameters_of_the_model(kind: str, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    sizes = wb.Transformer.from_config(config)
    assert sizes.parameters == pytest.approx(model.num_parameters(), rel=0.03)  # but for biases, positions that rotate, and norms
    outside = sum(each.numel() for name, each in model.named_parameters() if "embed" in name or "lm_head" in name or ".wte" in name)
    assert sizes.layers * sizes.products == pytest.approx(model.num_parameters() - outside, rel=0.06)


def test_a_file_a_folder_and_a_dict_are_read_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "gpt2", **GPT2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    expected = wb.Transformer(layers=3, hidden=256, heads=8, vocabulary=4096, sequence=512)
    assert wb.Transformer.from_config(config) == wb.Transformer.from_config(path) == wb.Transformer.from_config(str(tmp_path)) == expected
    assert wb.Transformer.from_config(config, sequence=128).sequence == 128
    plans = wb.plan(str(path), "DGX-A100", gpus=8, global_batch=64, sequence=128)
    same = wb.plan(wb.Transformer.from_config(config, 128), "DGX-A100", gpus=8, global_batch=64)
    assert str(plans) == str(same)
    assert main(["plan", str(path), "--cluster", "DGX-A100", "--gpus", "8", "--global-batch", "64", "--sequence", "128", "--json"]) == 0
    brief = json.loads(capsys.readouterr().out)
    assert (brief["plans"][0]["gpus"], brief["next"]["command"]) == (8, None), "sizes cannot be launched"
    assert main(["plan", str(path), "--cluster", "DGX-A100", "--gpus", "8", "--global-batch", "64", "--set", "optimizer=lamb"]) == 2
    assert "a Transformer has sizes only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "mixtral"}, "model_type='mixtral': its layers are not known here; known are gpt2, "),
        ({}, "model_type=None"),
        ({"model_type": "llama", **GROUPED, "head_dim": 128}, "8 heads of head_dim=128 are not 256 wide"),
        ({"model_type": "llama", "hidden_size": 256}, "lacks num_hidden_layers or n_layer, vocab_size, "),
        ({"model_type": ["llama"]}, "has model_type=['llama']: its layers are not known here"),
        ({"model_type": "opt", **SIZES, "word_embed_proj_dim": 128}, "word_embed_proj_dim=128 are not 256 wide"),
        (7, "the configuration is 7: expected the path of a config.json"),
        ("nothing.json", "nothing.json: no configuration can be read from it"),
    ],
)
def test_what_is_not_known_is_refused(config: Any, told: str) -> None:
    with pytest.raises(CostError, match=re.escape(told)):
        wb.Transformer.from_config(config)

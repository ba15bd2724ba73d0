"""Memory that others have measured on GPUs and published, with the programs that were measured.

Sizes are facts from the sources named; models are those of the libraries installed here, which may be newer than the ones measured.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from memory_programs import AMPERE, Figure, cycles, training
from torch import nn

GB, MIB = 10**9, 2**20
HOPPER, BLACKWELL = (9, 0), (10, 0)
RASCHKA = "github.com/rasbt/pytorch-memory-optim, logs.md: torch 2.1 nightly of June 2023, max_memory_reserved"
OPTIMUM = "huggingface.co/datasets/optimum-benchmark/rocm, benchmark_report.json, torch 2.3.1+rocm5.7"
HF = "huggingface.co/docs/transformers v4.21, perf_train_gpu_one: NVML, less 1,341 MiB with kernels loaded"
GPT_LEARNING = "github.com/anmechkoe/GPTlearning, exp13-accelerate: NVML, less 620 MiB of others and 656 MiB with kernels loaded"
LIGER = "github.com/linkedin/Liger-Kernel, all_benchmark_data.csv: max_memory_allocated of torch's or transformers' own"


def _pictures(count: int, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
    return lambda: (torch.empty(count, 3, 224, 224, dtype=dtype), torch.empty(count, dtype=torch.long))


def _words(count: int, length: int) -> Callable[[], Any]:
    return lambda: {"input_ids": torch.empty(count, length, dtype=torch.long), "labels": torch.empty(count, dtype=torch.long)}


def _language() -> Any:
    return {name: torch.empty(2, 16, dtype=torch.long) for name in ("input_ids", "attention_mask", "labels")}


def _vit() -> nn.Module:
    from torchvision.models import vit_l_16

    model: nn.Module = vit_l_16()
    model.heads.head = nn.Linear(1024, 10)  # type: ignore[union-attr]
    return model


def _classified(model: nn.Module, batch: Any) -> Any:
    out = model(batch[0])
    return F.cross_entropy(out, batch[1]), out


def _own_loss(model: nn.Module, batch: Any) -> Any:
    return (model(**batch).loss,)


def _bert_large(checkpointed: bool = False) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    model = BertForSequenceClassification(BertConfig(vocab_size=30522, attn_implementation="eager", **sizes))
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model


def _hub(name: str) -> nn.Module:
    import transformers

    kind = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM"}[name]
    model: nn.Module = getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(attn_implementation="eager"))
    return model


def _adam(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(weights)


def _adamw(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights)


def _adamw_by_one(weights: Any) -> torch.optim.Optimizer:
    """As transformers' own AdamW was: weight by weight."""
    return torch.optim.AdamW(weights, foreach=False)


def _sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights)


def _raschka(count: int, measured: float, optimizer: Any = _adam, accumulation: int = 1, dtype: Any = None, autocast: Any = None) -> Figure:
    pictures = _pictures(count, dtype or torch.float32)
    options = {"accumulation": accumulation, "autocast": autocast, "dtype": dtype, "clear_before_backward": accumulation == 1}
    program = training(_vit, pictures, _classified, optimizer, **options)
    return Figure(measured={"reserved": measured * GB}, source=RASCHKA, program=program, precision=autocast)


def _bert(measured: float, source: str, count: int, accumulation: int = 1, checkpointed: bool = False, half: bool = False) -> Figure:
    autocast = torch.float16 if half else None
    options = {"accumulation": min(2, accumulation), "autocast": autocast}  # two micro-batches hold what eight do
    program = training(lambda: _bert_large(checkpointed), _words(count, 512), _own_loss, _adamw_by_one, **options)
    return Figure(measured={"reserved": measured * MIB}, source=source, program=program, precision=autocast)


def _optimum(name: str, allocated: float, reserved: float) -> Figure:
    program = training(lambda: _hub(name), _language, _own_loss, _adamw)
    return Figure(measured={"allocated": allocated * 1e6, "reserved": reserved * 1e6}, source=OPTIMUM, program=program)


def _liger(measured: float, make: Callable[[], Any], capability: tuple[int, int] = AMPERE, backward_only: bool = False) -> Figure:
    program = cycles(make, backward_only)
    return Figure(measured={"allocated": measured * MIB}, source=LIGER, program=program, capability=capability, steady=True)


def _cross_entropy(vocabulary: int) -> Any:
    target = torch.randint(vocabulary, (16_384,))
    return torch.randn(16_384, vocabulary, requires_grad=True), lambda x: F.cross_entropy(x, target)


def _gated(batch: int, length: int, kind: str) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    module = LlamaMLP(LlamaConfig(hidden_size=4096, intermediate_size=11_008, hidden_act=kind)).to(torch.bfloat16)
    return torch.randn(batch, length, 4096, dtype=torch.bfloat16, requires_grad=True), module


def _norm(*shape: int, module: Callable[[], nn.Module]) -> Any:
    return torch.randn(*shape, requires_grad=True), module()


def _divergence(vocabulary: int) -> Any:
    target = torch.randn(16_384, vocabulary).softmax(-1)
    return torch.randn(16_384, vocabulary, requires_grad=True).log_softmax(-1), lambda x: F.kl_div(x, target, reduction="batchmean")


BF16, FP16 = torch.bfloat16, torch.float16
FIGURES: dict[str, Figure] = {
    "ViT-L/16, 64, fp32, Adam": _raschka(64, 26.79),
    "ViT-L/16, 64, fp16 autocast, Adam": _raschka(64, 18.21, autocast=FP16),
    "ViT-L/16, 64, bf16, Adam": _raschka(64, 13.82, dtype=BF16),
    "ViT-L/16, 16, bf16, Adam": _raschka(16, 5.69, dtype=BF16),
    "ViT-L/16, 4 × 4, bf16, Adam": _raschka(4, 3.91, dtype=BF16, accumulation=4),
    "ViT-L/16, 4 × 4, bf16, SGD": _raschka(4, 2.02, dtype=BF16, accumulation=4, optimizer=_sgd),
    "GPT-2, 2 × 16 tokens, AdamW": _optimum("GPT2", 2506.73664, 2894.06976),
    "BERT base, 2 × 16 tokens, AdamW": _optimum("Bert", 2195.345408, 2497.708032),
    "BERT large, 4 × 512": _bert(14949 - 1341, HF, 4),
    "BERT large, 1 × 512, accumulating 4": _bert(8681 - 1341, HF, 1, 4),
    "BERT large, 1 × 512, accumulating 4, checkpointed": _bert(6775 - 1341, HF, 1, 4, checkpointed=True),
    "BERT large, 4 × 512, fp16 autocast": _bert(13746 - 1341, HF, 4, half=True),
    "BERT large, 4 × 512 (2)": _bert(12852 - 1276, GPT_LEARNING, 4),
    "BERT large, 1 × 512, accumulating 4 (2)": _bert(8590 - 1276, GPT_LEARNING, 1, 4),
    "BERT large, 8 × 512, accumulating 8 (2)": _bert(20314 - 1276, GPT_LEARNING, 8, 8),
    "BERT large, 1 × 512, accumulating 4, checkpointed (2)": _bert(7078 - 1276, GPT_LEARNING, 1, 4, checkpointed=True),
    "BERT large, 8 × 512, accumulating 8, checkpointed (2)": _bert(8030 - 1276, GPT_LEARNING, 8, 8, checkpointed=True),
    "BERT large, 4 × 512, fp16 autocast (2)": _bert(11224 - 1276, GPT_LEARNING, 4, half=True),
    "BERT large, 1 × 512, fp16, accumulating, checkpointed (2)": _bert(7574 - 1276, GPT_LEARNING, 1, 4, checkpointed=True, half=True),
    "cross-entropy, 16,384 × 4,096": _liger(1280.1259765625, lambda: _cross_entropy(4096)),
    "cross-entropy, 16,384 × 131,072": _liger(40960.125, lambda: _cross_entropy(131_072)),
    "GEGLU, 8 × 1,024, backward": _liger(1992.25, lambda: _gated(8, 1024, "gelu_pytorch_tanh"), backward_only=True),
    "GEGLU, 8 × 8,192": _liger(12212.25, lambda: _gated(8, 8192, "gelu_pytorch_tanh")),
    "SwiGLU, 4 × 1,024": _liger(1294.25, lambda: _gated(4, 1024, "silu")),
    "SwiGLU, 4 × 8,192": _liger(6372.25, lambda: _gated(4, 8192, "silu")),
    "layer norm, 4,096 × 1,024": _liger(80.0625, lambda: _norm(4096, 1024, module=lambda: nn.LayerNorm(1024))),
    "layer norm, 4,096 × 16,384": _liger(1280.53125, lambda: _norm(4096, 16_384, module=lambda: nn.LayerNorm(16_384))),
    "KL divergence, 16,384 × 4,096": _liger(1792.0, lambda: _divergence(4096), HOPPER),
    "group norm, 128 × 32 × 512": _liger(40.06640625, lambda: _norm(128, 32, 512, module=lambda: nn.GroupNorm(8, 32)), BLACKWELL),
}

"""`Transformer`: parameters, FLOPs and messages of a GPT or Llama by its sizes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.cluster.analysis.collective_cost import CostError
from workbench.core.checks import choice, whole_number

RECOMPUTATIONS = ("none", "selective", "full")
_OPTIONAL = ("heads", "kv_heads", "feed_forward")
_EXCHANGES = {"none": 4, "selective": 5, "full": 6}
"""All-reduces (or pairs of reduce-scatter and all-gather) per layer and micro-batch under tensor parallelism: two forward, two backward;
two more for a recomputed forward; one more pair's worth with sequence parallelism, which gathers the inputs of both halves again."""
_FAMILIES = {
    **{name: {"gated": True, "tied": False} for name in ("llama", "mistral", "qwen2", "phi3", "olmo2", "granite")},
    "smollm3": {"gated": True, "tied": True},
    "gpt_neox": {"gated": False, "tied": False},
    **{name: {"gated": False, "tied": True} for name in ("gpt2", "opt")},
}
"""`model_type` of transformers → is its feed-forward gated, and its output layer the embedding unless the configuration says so?"""
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "vocabulary": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "feed_forward": ("intermediate_size", "ffn_dim", "n_inner"),
}
"""Our name of a size → its names in a configuration of transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder of equal layers: like GPT-2 and GPT-3, with feed-forwards of width 4h, or like Llama, with gated ones and grouped heads.

    >>> gpt3 = Transformer(layers=96, hidden=12288, vocabulary=51200, sequence=2048)
    >>> f"{gpt3.parameters / 1e9:.0f} G"
    '175 G'
    >>> sizes = {"layers": 32, "hidden": 4096, "vocabulary": 128256, "sequence": 8192, "heads": 32, "kv_heads": 8}
    >>> llama3 = Transformer(**sizes, feed_forward=14336, gated=True, tied=False)
    >>> f"{llama3.parameters / 1e9:.2f} G"
    '8.03 G'
    """

    layers: int
    """l, number of layers."""
    hidden: int
    """h, width of the residual stream."""
    vocabulary: int
    """V, words of the vocabulary."""
    sequence: int
    """s, tokens of a sample."""
    heads: int | None = None
    """a, of attention; None = not given (128 wide each, where it matters)."""
    kv_heads: int | None = None
    """Heads of keys and values, if several query heads share them (grouped queries); None = as many as heads."""
    feed_forward: int | None = None
    """Width of the feed-forward; None = 4h."""
    gated: bool = False
    """Is the feed-forward a product of two (SwiGLU), with a third matrix? Such models have no biases, and no learned positions."""
    tied: bool = True
    """Is the output layer the embedding?"""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "vocabulary", "sequence", *(name for name in _OPTIONAL if getattr(self, name) is not None)):
            whole_number(name, getattr(self, name), least=1, error=CostError)
        if self.heads is not None and self.hidden % self.heads:
            near = min((n for n in range(1, self.hidden + 1) if self.hidden % n == 0), key=lambda n: abs(n - (self.heads or 1)))
            raise CostError(f"heads={self.heads}: it has to divide hidden={self.hidden}, as {near} does")
        if self.kv_heads is not None and (self.heads is None or self.heads % self.kv_heads):
            raise CostError(f"kv_heads={self.kv_heads}: it has to divide heads={self.heads}")

    @classmethod
    def from_config(cls, config: Any, sequence: int | None = None) -> "Transformer":
        """Read the sizes of a Hugging Face causal language model.

        Args:
            config: a `config.json`, its folder, its content as a dict, or a configuration object of transformers.
            sequence: tokens of a sample; None = the model's largest number of positions, which is often more than it is trained with.

        Raises:
            CostError: no such file, no JSON, another kind of model (a mixture of experts, heads that are wider than hidden / heads), or a
                size is missing.
        """
        known, where = _read_config(config)
        family = _FAMILIES.get(str(known.get("model_type")))
        if family is None:
            allowed = ", ".join(sorted(_FAMILIES))
            raise CostError(
                f"{where} has model_type={known.get('model_type')!r}: its layers are not known here; known are {allowed}. Give sizes of "
                "a similar model, wb.Transformer(layers=…, hidden=…, …), or plan the module itself, plan(model, cluster, batch=…)"
            )
        sizes: dict[str, Any] = {
            ours: next((known[key] for key in keys if known.get(key) is not None), None) for ours, keys in _KEYS.items()
        }
        sizes["sequence"] = sequence if sequence is not None else sizes["sequence"]
        if missing := [ours for ours in ("layers", "hidden", "vocabulary", "sequence", "heads") if sizes[ours] is None]:
            keys = ", ".join(" or ".join(_KEYS[ours]) for ours in missing)
            raise CostError(
                f"{where} lacks {keys}: transformers leaves out what is the default; save it whole with to_json_file(path, False)"
            )
        wide = known.get("head_dim")
        if wide is not None and wide * sizes["heads"] != sizes["hidden"]:
            raise CostError(f"{where}: {sizes['heads']} heads of head_dim={wide} are not {sizes['hidden']} wide, which is not planned here")
        words = known.get("word_embed_proj_dim", sizes["hidden"])
        if words != sizes["hidden"]:
            raise CostError(f"{where}: embeddings of word_embed_proj_dim={words} are not {sizes['hidden']} wide, which is not planned here")
        tied = known.get("tie_word_embeddings")
        return cls(**sizes, gated=family["gated"], tied=family["tied"] if tied is None else tied)

    @property
    def grouped(self) -> float:
        """Share of the heads that have their own keys and values."""
        return 1.0 if self.kv_heads is None or self.heads is None else self.kv_heads / self.heads

    @property
    def width(self) -> int:
        """Width of the feed-forward."""
        return 4 * self.hidden if self.feed_forward is None else self.feed_forward

    @property
    def products(self) -> float:
        """Weights in a layer's matrices: 2h² (1 + k/a) for attention, 2 or 3 h f for the feed-forward; 12h² for a GPT."""
        h = self.hidden
        return 2 * h**2 * (1 + self.grouped) + (3 if self.gated else 2) * h * self.width

    @property
    def embeddings(self) -> float:
        """Weights outside the layers: token embeddings, learned positions, and an untied output layer."""
        words = self.vocabulary * (1 if self.tied else 2)
        return (words + (0 if self.gated else self.sequence)) * self.hidden

    @property
    def parameters(self) -> float:
        """12 l h² (1 + 13/(12h) + (V+s)/(12 l h)) for a GPT: matrices, 13 l h of biases and norms, embeddings; 2 l h of norms if gated.

        Source: Narayanan et al. 2021, arXiv 2104.04473, equation 2.
        """
        return self.layers * self.products + (2 if self.gated else 13) * self.layers * self.hidden + self.embeddings

    def flops(self, batch: float, recompute: str = "none") -> float:
        """FLOPs of an iteration: forward, backward and recomputation; matrix products only.

        For a GPT: none (these are the model's FLOPs) 72 B s l h² (1 + s/6h + V/12lh); full 96 B s l h² (1 + s/6h + V/16lh); selective
        (attention alone again) 72 B s l h² (1 + s/3h + V/12lh). Other models have other matrices instead of 12 h². Source: Narayanan et al.
        2021, equation 3; Korthikanti et al. 2022, arXiv 2205.05198, appendix A.

        Args:
            batch: sequences per iteration, B.
            recompute: "none", "selective" or "full".

        Raises:
            CostError: another kind of recomputation.
        """
        l, h, s, v = self.layers, self.hidden, self.sequence, self.vocabulary  # noqa: E741  the letters of the source
        tokens, times = batch * s, 4 if checked_recompute(recompute) == "full" else 3  # a backward is two forwards
        scores = 24 if recompute == "selective" else 4 * times
        return tokens * (2 * times * l * self.products + scores * l * s * h + 6 * v * h)

    def exchanges(self, recompute: str = "none") -> int:
        """All-reduces per layer and micro-batch under tensor parallelism, or pairs of reduce-scatter and all-gather."""
        return _EXCHANGES[checked_recompute(recompute)]

    def boundary_bytes(self, samples: float, element: float = 2) -> float:
        """Bytes that a pipeline stage sends to the next one, and receives back as gradients, for `samples` sequences."""
        return samples * self.sequence * self.hidden * element


def _read_config(config: Any) -> tuple[Mapping[str, Any], str]:
    """The configuration as a mapping, and what to call it in a message."""
    if isinstance(config, str | Path):
        path = Path(config).expanduser()
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CostError(f"{path}: no configuration can be read from it ({error})") from error
        where = str(path)
    else:
        where, config = "the configuration", config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(config, Mapping):
        raise CostError(f"{where} is {config!r:.60}: expected the path of a config.json, a dict or a configuration of transformers")
    return config, where


def checked_recompute(recompute: str) -> str:
    """The kind of recomputation, checked.

    Raises:
        CostError: an unknown kind.
    """
    choice("recompute", recompute, RECOMPUTATIONS, error=CostError)
    return recompute

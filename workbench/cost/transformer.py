"""Transformer: parameters, FLOPs and messages of a GPT by its sizes."""

from dataclasses import dataclass

from workbench.cost.collectives import CostError, checked_ranks

RECOMPUTATIONS = ("none", "selective", "full")
_EXCHANGES = {"none": 4, "selective": 5, "full": 6}
"""All-reduces (or pairs of reduce-scatter and all-gather) per layer and micro-batch under tensor parallelism: two forward, two backward;
two more where the forward is done again; one more pair's worth with sequence parallelism, which gathers the inputs of both halves again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder of equal layers with 4h wide feed-forwards, as GPT-2 and GPT-3 are.

    >>> gpt3 = Transformer(layers=96, hidden=12288, vocabulary=51200, sequence=2048)
    >>> f"{gpt3.parameters / 1e9:.0f} G"
    '175 G'
    """

    layers: int
    """l."""
    hidden: int
    """h, width of the residual stream."""
    vocabulary: int
    """V."""
    sequence: int
    """s, tokens of a sample."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "vocabulary", "sequence"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CostError(f"{name}={value!r}: a whole number of at least 1 is wanted")

    @property
    def parameters(self) -> float:
        """12 l h² (1 + 13/(12h) + (V+s)/(12 l h)). Source: Narayanan et al. 2021, arXiv 2104.04473, equation 2."""
        l, h = self.layers, self.hidden  # noqa: E741  the letters of the source
        return 12 * l * h**2 * (1 + 13 / (12 * h) + (self.vocabulary + self.sequence) / (12 * l * h))

    def flops(self, batch: float, recompute: str = "none") -> float:
        """FLOPs of an iteration: forward, backward, and what is computed again; matrix products only.

        none (these are the model's FLOPs): 72 B s l h² (1 + s/6h + V/12lh). full: 96 B s l h² (1 + s/6h + V/16lh). selective (attention
        alone again): 72 B s l h² (1 + s/3h + V/12lh). Source: Narayanan et al. 2021, equation 3; Korthikanti et al. 2022,
        arXiv 2205.05198, appendix A.

        Args:
            batch: sequences per iteration, B.
            recompute: "none", "selective" or "full".

        Raises:
            CostError: another recomputation.
        """
        l, h, s, v = self.layers, self.hidden, self.sequence, self.vocabulary  # noqa: E741
        base = batch * s * l * h**2
        if checked_recompute(recompute) == "full":
            return 96 * base * (1 + s / (6 * h) + v / (16 * l * h))
        return 72 * base * (1 + s / ((3 if recompute == "selective" else 6) * h) + v / (12 * l * h))

    def tensor_bytes(self, samples: float, tensor: int, recompute: str = "none", element: float = 2) -> float:
        """Bytes that a rank sends for tensor parallelism, all layers, for `samples` sequences: 2(t−1)/t · s h per all-reduce and sequence.

        Sequence parallelism sends as much, as reduce-scatters and all-gathers. Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3;
        Korthikanti et al. 2022, section 4. Left out: embedding and output layer.

        Args:
            samples: sequences.
            tensor: ranks that split each layer, t.
            recompute: as in `flops`; "selective" is taken with sequence parallelism, as in the source.
            element: bytes of one number.
        """
        t = checked_ranks(tensor)
        exchanges = _EXCHANGES[checked_recompute(recompute)]
        return exchanges * 2 * (t - 1) / t * samples * self.sequence * self.hidden * element * self.layers

    def boundary_bytes(self, samples: float, element: float = 2) -> float:
        """Bytes that a pipeline's stage hands to the next one, and gets back as gradients, for `samples` sequences."""
        return samples * self.sequence * self.hidden * element


def checked_recompute(recompute: str) -> str:
    """A kind of recomputation.

    Raises:
        CostError: it is none.
    """
    if recompute not in RECOMPUTATIONS:
        raise CostError(f"recompute={recompute!r}: allowed are {', '.join(RECOMPUTATIONS)}")
    return recompute

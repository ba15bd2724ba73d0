"""Packing: how documents become rows of one length, and what each policy wastes: padding, tokens that are lost, documents that are cut."""

import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.core import units
from workbench.core.checks import choice, whole_number
from workbench.core.codec import JsonDataclass
from workbench.core.display.table import Shown, Table
from workbench.core.synonyms import accept_synonyms

POLICIES = {
    "pad": "a document in each row: filled up with padding, and cut off where it is longer",
    "split": "all documents in one stream, cut into rows wherever a row ends",
    "best fit": "whole documents in the fullest row that has space for them; only longer ones than a row are cut",
}
"""Policy → what it does. Best fit: Ding et al., Fewer truncations improve language modeling, ICML 2024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing(JsonDataclass):
    """Which tokens of which documents are in which row."""

    policy: str
    """A key of `POLICIES`."""
    length: int
    """Tokens of a row."""
    documents: int
    """Number of documents."""
    tokens: int
    """Of all documents."""
    pieces: tuple[tuple[int, int, int, int], ...]
    """(row, document, first token, end) of each piece, row by row."""
    cut: int
    """Documents that are cut, into pieces or off."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return 1 + max((row for row, *_ in self.pieces), default=-1)

    @property
    def lost(self) -> int:
        """Tokens that are in no row."""
        return self.tokens - sum(stop - start for _, _, start, stop in self.pieces)

    @property
    def padding(self) -> float:
        """Share of the positions in all rows without a token, which are computed in vain."""
        places = self.rows * self.length
        return 1 - (self.tokens - self.lost) / places if places else 0.0

    def fill(self, documents: Sequence[Sequence[int]], pad: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Tokens, documents and positions of all rows, each rows × length.

        Args:
            documents: tokens of each.
            pad: the token at empty positions, whose document is -1. Tokens may attend only to tokens of the same document: `documents[:, :,
                None] == documents[:, None, :]`.
        """
        tokens = np.full((self.rows, self.length), pad, np.int64)
        owners, places = np.full_like(tokens, -1), np.zeros_like(tokens)
        used: dict[int, int] = defaultdict(int)
        for row, document, start, stop in self.pieces:
            begin = used[row]
            used[row] = end = begin + stop - start
            tokens[row, begin:end] = documents[document][start:stop]
            owners[row, begin:end] = document
            places[row, begin:end] = np.arange(start, stop)
        return tokens, owners, places


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPolicies(JsonDataclass, Shown):
    """The same documents packed by each policy."""

    packings: tuple[Packing, ...]
    """One for each of `POLICIES`."""

    def __getitem__(self, policy: str) -> Packing:
        choice("policy", policy, POLICIES)
        return next(each for each in self.packings if each.policy == policy)

    @property
    def table(self) -> Table:
        """A row per policy: rows, padding, lost tokens, cut documents."""
        rows = [
            (
                each.policy,
                f"{each.rows:,}",
                units.percent(each.padding),
                units.percent(each.lost / max(1, each.tokens)),
                units.percent(each.cut / max(1, each.documents)),
                POLICIES[each.policy],
            )
            for each in self.packings
        ]
        one = self.packings[0]
        title = f"{one.documents:,} documents of {one.tokens:,} tokens in rows of {one.length:,}"
        return Table(columns=("policy", "rows", "padding", "tokens lost", "documents cut", "what it does"), rows=rows, title=title)


@accept_synonyms
def pack(lengths: Sequence[int], length: int, policy: str = "best fit") -> Packing:
    """Pack documents into rows of one length.

    Args:
        lengths: tokens of each document; those without tokens are in no row.
        length: tokens of a row.
        policy: "pad", "split" or "best fit", see `POLICIES`.

    Raises:
        ValueError: the length is below 1, or the policy is unknown.
    """
    whole_number("length", length, least=1)
    choice("policy", policy, POLICIES)
    sizes = [int(size) for size in lengths]
    pieces: list[tuple[int, int, int, int]] = []
    if policy == "pad":
        filled = [(number, min(size, length)) for number, size in enumerate(sizes) if size]
        pieces = [(row, number, 0, size) for row, (number, size) in enumerate(filled)]
    elif policy == "split":
        place = 0
        for number, size in enumerate(sizes):
            start = 0
            while start < size:
                stop = min(size, start + length - place % length)
                pieces.append((place // length, number, start, stop))
                place += stop - start
                start = stop
    else:
        pieces = _best_fit(sizes, length)
    cut = sum(size > length for size in sizes)
    if policy == "split":
        cut = sum(count > 1 for count in Counter(document for _, document, _, _ in pieces).values())
    return Packing(policy=policy, length=length, documents=len(sizes), tokens=sum(sizes), pieces=tuple(pieces), cut=cut)


@accept_synonyms
def compare_packing(lengths: Sequence[int], length: int) -> PackingPolicies:
    """Pack the same documents by each policy, and show how much each policy wastes.

    Args:
        lengths: tokens of each document.
        length: tokens of a row.
    """
    return PackingPolicies(packings=tuple(pack(lengths, length, policy) for policy in POLICIES))


def _best_fit(sizes: Sequence[int], length: int) -> list[tuple[int, int, int, int]]:
    parts = [(n, start, min(size, start + length)) for n, size in enumerate(sizes) for start in range(0, size, length)]
    parts.sort(key=lambda part: (part[1] - part[2], part))  # the largest first
    free: dict[int, list[int]] = defaultdict(list)  # space left → rows
    spaces: list[int] = []  # those that occur, in order
    pieces, rows = [], 0
    for number, start, stop in parts:
        size = stop - start
        place = bisect.bisect_left(spaces, size)
        if place < len(spaces):
            space = spaces[place]
            row = free[space].pop()
            if not free[space]:
                spaces.pop(place)
        else:
            space, row, rows = length, rows, rows + 1
        pieces.append((row, number, start, stop))
        if left := space - size:
            if not free[left]:
                bisect.insort(spaces, left)
            free[left].append(row)
    return sorted(pieces, key=lambda piece: piece[0])

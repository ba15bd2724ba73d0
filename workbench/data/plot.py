"""Pictures of data: the groups that an audit has found."""

import base64
import io
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from workbench.core.display.axes import ink, prepared
from workbench.data.analysis.data_audit import DataAudit, Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDE, COLUMNS = 64, 4
"""Pixels of a picture's side, and pictures of a group."""


def duplicates(result: DataAudit, ax: "Axes | None" = None, *, groups: int = 8) -> "Axes":
    """The most important groups, one row of pictures each: leaks first, then conflicting labels, equal and near samples.

    Args:
        result: the result of `wb.data.audit`.
        ax: the Axes to draw into; None makes a figure.
        groups: largest number of groups to draw.

    Raises:
        ValueError: no group of pictures was found.
    """
    shown = [group for group in result.groups if any(member.picture for member in group.members)]
    shown = sorted(shown, key=lambda group: (len(group.splits) < 2, len(group.labels) < 2, not group.exact))[:groups]
    if not shown:
        raise ValueError(f"{result!r}: no group of pictures was found, so there is nothing to draw; print it instead")
    ax = prepared(ax, 7.0, 0.35 + 0.72 * len(shown))
    pad = 6
    sheet = np.full((len(shown) * (SIDE + pad), COLUMNS * (SIDE + pad), 3), 255, np.uint8)
    for row, group in enumerate(shown):
        for column, member in enumerate(group.members[:COLUMNS]):
            if member.picture:
                image = Image.open(io.BytesIO(base64.b64decode(member.picture))).convert("RGB")
                image.thumbnail((SIDE, SIDE))
                top, left = row * (SIDE + pad), column * (SIDE + pad)
                sheet[top : top + image.height, left : left + image.width] = np.asarray(image)
    ax.imshow(sheet)
    ax.set_xlim(-2, 3.0 * sheet.shape[1])
    ax.axis("off")
    for row, group in enumerate(shown):
        ax.text(sheet.shape[1] + 8, row * (SIDE + pad) + SIDE / 2, _said(group), va="center", fontsize=9, color=ink(ax))
    return ax


def _said(group: Group) -> str:
    more = len(group.members) - COLUMNS
    first = f"equal by {group.kind}" if group.exact else group.kind
    lines = [f"{first}, {len(group.members)} samples" + (f" ({more} not shown)" if more > 0 else "")]
    if len(group.splits) > 1:
        lines.append(f"in {' and '.join(group.splits)}"[:48])
    if group.labels:
        lines.append(f"labelled {' and '.join(group.labels)}"[:48])
    return "\n".join(lines)

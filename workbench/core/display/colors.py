"""The colours of phases, parts of a step and parts of memory, the same in every picture and panel, distinct for colour-blind readers too.

Warm: the step waits for data or moves it. Blue: it computes. Purple: it updates the weights. Green: ranks exchange gradients. Brown: it is
delayed. Grey: the rest. What clocks call a phase and experiments call a part has one colour. Any two phases, parts or groups of memory
are at least 25 apart in CIE L*a*b* for normal, protanopic, deuteranopic and tritanopic eyes (a test measures it; Okabe and Ito's well-known
palette, from which these were moved, comes down to 16 here, its green beside our grey). No colour is the only sign: a legend, a label or
a tooltip says the same in words.
"""

PHASES = {"data_wait": "#da5300", "h2d": "#f0c93a", "forward": "#0957ae", "backward": "#62b2ee", "optimizer": "#9a5680", "other": "#bababa"}
"""Phase → colour, in the order of `vocabulary.PHASES`."""

PARTS = {
    "data_wait": PHASES["data_wait"],
    "transfer": PHASES["h2d"],
    "compute": PHASES["forward"],
    "host": "#b3d6f6",
    "optimizer": PHASES["optimizer"],
    "communication": "#61a461",
    "straggler": "#7e2f00",
    "stalls": "#4f4437",
}
"""Part of a diagnosed step → colour, in the order of `vocabulary.PARTS`."""

GROUPS = {
    "parameters": PARTS["stalls"],
    "gradients": PHASES["backward"],
    "optimizer_states": PHASES["optimizer"],
    "activations": PHASES["forward"],
    "temporaries": PHASES["data_wait"],
    "inputs": PHASES["h2d"],
    "buffers": PARTS["straggler"],
    "other": PHASES["other"],
}
"""Group of memory → colour, in the order of `vocabulary.GROUPS`; activations have the colour of forward, which makes them, and so on."""

LINE = "#2b8cd6"
"""The one curve of a picture that has one; a blue that reads on white and on near-black."""

LINE_PALE = "#9dcbf0"
"""LINE, paler: what was there before, or is only predicted."""

LIMIT = "#d0342c"
"""The most that a device has: a line across bars."""

SMALLEST, LARGEST = PHASES["backward"], "#0b2e63"
"""Ends of a scale of blues, from the smallest model to the largest."""

RESERVED, OUTSIDE = "#a3a3a3", "#6f6f6f"
"""What a device holds beside tensors: reserved and not allocated, and outside of the allocator. Greys, since they belong to no group."""

SUCCESS, WARNING, ERROR = "#388e3c", "#f57c00", "#d32f2f"
"""How a run ended, in panels whose theme has no colours for that."""

INK = "#808080"
"""Axes and text: at least 3.9:1 against white and against JupyterLab's dark background."""

INK_DARKER = "#7f7f7f"
"""The same to the eye. Jupyter puts a slab behind a transparent picture whose tick labels are all light or all dark (`needs_background`);
INK counts as light, this as dark, and a picture with both is left alone."""


CSS = (
    f":root {{ --wb-line: {LINE}; --wb-success: var(--jp-success-color1, {SUCCESS}); "
    f"--wb-warning: var(--jp-warn-color1, {WARNING}); --wb-error: var(--jp-error-color1, {ERROR}); }}\n"
)
"""The variables by which style sheets name colours."""


def text_on(color: str) -> str:
    """Black or white, whichever reads better on `color` ("#rrggbb").

    >>> text_on(PHASES["forward"]), text_on(PHASES["h2d"])
    ('#ffffff', '#000000')
    """
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))  # WCAG 2.2, relative luminance
    return "#000000" if luminance > 0.25 else "#ffffff"

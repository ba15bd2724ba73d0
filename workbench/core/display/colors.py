"""The colours of all pictures and panels. A colour has one meaning, and colour-blind readers can tell them apart.

Orange: the step waits for data. Yellow: it moves data. Blue: it computes, dark forward and light backward. Purple: it updates the weights.
Green: ranks exchange gradients. Dark red: others hold it up. Violet: nothing works. Grey: the rest. What clocks call a phase and
experiments call a part has one colour; memory has the colour of the phase that makes it, else one of its own. What has no meaning of its
own (rules, streams, plans) takes a colour of SERIES, and a legend says which. Red is the limit of a device.

Any two phases, parts or groups of memory are at least 25 apart in CIE L*a*b* for normal, protanopic, deuteranopic and tritanopic eyes (a
test measures it; Okabe and Ito's well-known palette, from which these were moved, comes down to 16 here, its green beside our grey). No
colour is the only sign: a legend, a label or a tooltip says the same in words, and areas have an outline. How marks are drawn with these
colours, solid where measured and hatched or hollow where predicted, is in `axes.py`.
"""

PHASES = {"data_wait": "#da5300", "h2d": "#f0c93a", "forward": "#0957ae", "backward": "#62b2ee", "optimizer": "#9a5680", "other": "#bababa"}
"""Phase → colour, in the order of `vocabulary.PHASES`."""

IDLE = "#8a3ffc"
"""Nothing works: stalls, a device that idles, the bubble of a pipeline, gaps between kernels."""

PARTS = {
    "data_wait": PHASES["data_wait"],
    "transfer": PHASES["h2d"],
    "compute": PHASES["forward"],
    "host": "#b3d6f6",
    "optimizer": PHASES["optimizer"],
    "communication": "#61a461",
    "straggler": "#7e2f00",
    "stalls": IDLE,
}
"""Part of a diagnosed step → colour, in the order of `vocabulary.PARTS`."""

GROUPS = {
    "parameters": "#4f4437",
    "gradients": PHASES["backward"],
    "optimizer_states": PHASES["optimizer"],
    "activations": PHASES["forward"],
    "temporaries": "#e07b54",
    "inputs": PHASES["h2d"],
    "buffers": "#bbffaa",
    "other": PHASES["other"],
}
"""Group of memory → colour, in the order of `vocabulary.GROUPS`; activations have the colour of forward, which makes them, and so on."""

RESERVED, OUTSIDE = "#ededed", "#6f6f6f"
"""What a device holds beside tensors: reserved and not allocated, and outside of the allocator. Greys, since they belong to no group.

The dark one also stands for a step whose parts nobody knows."""

TRACED = {"python": "#5b3a54", "launch": "#77e69a", "copy": "#fbf3c4"}
"""What only traces tell apart: Python between operators, calls that launch kernels, copies that do not go to the device."""

LINE = "#2b8cd6"
"""The one curve of a picture that has one; a blue that reads on white and on near-black."""

LINE_PALE = "#9dcbf0"
"""LINE, paler: what was there before."""

SERIES = (LINE, "#a83a50", "#969612", "#c04fc8", "#1d7a6b")
"""Colours without a meaning of their own, for what a legend names. The first three are told apart by everybody; markers and dashes help."""

LIMIT = "#d0342c"
"""The most that a device has: a solid line, with its name beside it or in the legend."""

SIZES = {"light": ("#3f93d6", "#0b2e63"), "dark": ("#1f6fb5", "#cfe6fa")}
"""Ground → ends of a scale of blues, from the smallest model to the largest."""

SUCCESS, WARNING, ERROR = "#388e3c", "#f57c00", "#d32f2f"
"""How a run ended, and whether a rule holds, in panels whose theme has no colours for that."""

INK = {"light": "#4d4d4d", "dark": "#c8c8c8"}
"""Ground → axes and text: at least 8:1."""

OUTLINE = "#767676"
"""The hairline around areas in panels, whose ground is the theme's: at least 4:1 on white and on near-black."""


CSS = (
    f":root {{ --wb-line: {LINE}; --wb-success: var(--jp-success-color1, {SUCCESS}); "
    f"--wb-warning: var(--jp-warn-color1, {WARNING}); --wb-error: var(--jp-error-color1, {ERROR}); --wb-outline: {OUTLINE}; }}\n"
)
"""The variables by which style sheets name colours."""


def text_on(color: str) -> str:
    """Black or white, whichever reads better on `color` ("#rrggbb"): at least 4.5:1.

    >>> text_on(PHASES["forward"]), text_on(PHASES["h2d"])
    ('#ffffff', '#000000')
    """
    return max(("#ffffff", "#000000"), key=lambda text: contrast(text, color))


def contrast(one: str, other: str) -> float:
    """Contrast of two colours ("#rrggbb") by WCAG 2.2, from 1 to 21; text needs 4.5, a mark 3.

    >>> contrast("#000000", "#ffffff")
    21.0
    """
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def mixed(color: str, ground: str, share: float) -> str:
    """`share` of a colour and the rest of the ground.

    >>> mixed("#000000", "#ffffff", 0.5)
    '#808080'
    """
    pairs = [(int(color[i : i + 2], 16), int(ground[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in pairs)

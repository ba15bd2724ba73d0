"""Compares memory estimates with the true peak on a CPU: the workbench, torch's MemTracker, accelerate, DeepSpeed and torch-kitsune.

    python benchmarks/memory.py [CASE…] [--peer-python PYTHON] [--install FOLDER] [--no-published]

Every answer comes from a fresh process. Then: what lies beyond this machine (64 ranks, sliders), and our estimates of steps whose memory
others have measured on GPUs and published (`memory_published.py`). The peers need `pip install --no-deps accelerate==1.15.0
torch-kitsune==0.7.0` and the published models `transformers` and `torchvision`; `--install FOLDER` makes an environment with them beside
this one. A peer that is not there is left out. About 10 minutes on two cores.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import venv
from datetime import date
from pathlib import Path
from typing import Any

from workbench.core import units
from workbench.core.display.table import Table

HERE = Path(__file__).parent
LIMIT = 600
"""Seconds that an answer may take."""
PEERS = ("accelerate==1.15.0", "torch-kitsune==0.7.0", "transformers==5.23.0", "torchvision==0.28.0", "tokenizers", "regex", "safetensors")
LIGHT = ("huggingface_hub", "pyyaml", "psutil", "requests", "rich")
"""What the peers import; with their other dependencies they would bring a torch of their own."""


def install(folder: Path) -> Path:
    """An environment beside this one, that sees its packages, with the peers.

    Returns:
        Its Python.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        packages = next((folder / "lib").glob("python*/site-packages"))
        own = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "beside.pth").write_text("\n".join([*own, str(HERE.parent)]) + "\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", *PEERS], check=True)
    subprocess.run([*pip, *LIGHT], check=True)
    return python


def answer(python: Path, judge: str, case: str) -> dict[str, Any]:
    """What a judge says, from a fresh process."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6", "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    command = [str(python), str(HERE / "memory.py"), "--judge", judge, case]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {"cannot": f"no answer within {LIMIT} s"}
    last = done.stdout.strip().rpartition("\n")[2]
    return json.loads(last) if last.startswith("{") else {"cannot": (done.stderr.strip().splitlines() or ["died"])[-1][:100]}


def judged(judge: str, case: str) -> dict[str, Any]:
    """What a judge says, in this process."""
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):  # torchvision's wheel, which wants a CUDA build of torch, is then importable without its binary
        with contextlib.suppress(RuntimeError):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        if judge == "scale":
            from memory_scale import SCALE

            return SCALE[case][1]()
        if judge == "published":
            from memory_published import FIGURES

            return FIGURES[case].predicted()
        from memory_cases import CASES, COMPILED
        from memory_judges import COMPILERS, JUDGES

        began = time.process_time()
        held = COMPILERS[judge](COMPILED[case]) if case in COMPILED else JUDGES[judge](CASES[case])
        return {"bytes": held, "seconds": time.process_time() - began}
    except ModuleNotFoundError as error:
        return {"cannot": f"{error.name} is not installed"}
    except Exception as error:
        return {"cannot": (str(error).splitlines() or [type(error).__name__])[0][:80], "error": type(error).__name__}


def against_the_truth(python: Path, names: list[str]) -> Table:
    """Each tool's estimate over the true peak."""
    from memory_cases import CASES
    from memory_judges import JUDGES

    tools = [name for name in JUDGES if name != "truth"]
    rows: list[list[object]] = []
    off: dict[str, list[float]] = {tool: [] for tool in tools}
    took: dict[str, list[float]] = {tool: [] for tool in tools}
    for name in names:
        true = answer(python, "truth", name)["bytes"]
        cells: list[object] = []
        for tool in tools:
            found = answer(python, tool, name)
            if "bytes" in found:
                off[tool].append(found["bytes"] / true)
                took[tool].append(found["seconds"])
            cells.append(f"{found['bytes'] / true:.4f}" if "bytes" in found else "cannot")
            if "cannot" in found:
                print(f"{name}: {tool}: {found['cannot']}", file=sys.stderr)
        rows.append([f"{name} ({CASES[name].title})", units.bytes_(true), *cells])
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    errors = {tool: sorted(abs(ratio - 1) for ratio in ratios) for tool, ratios in off.items()}
    summary = [
        ["median error", "", *(units.percent(statistics.median(errors[tool])) if errors[tool] else "–" for tool in tools)],
        ["worst error", "", *(units.percent(errors[tool][-1]) if errors[tool] else "–" for tool in tools)],
        ["answers", "", *(f"{len(errors[tool])} of {len(names)}" for tool in tools)],
        ["time of an answer (median)", "", *(units.seconds(statistics.median(took[tool])) if took[tool] else "–" for tool in tools)],
    ]
    return Table(columns=("case", "true peak", *tools), rows=[*rows, *summary], title="Estimate over true peak", note=note())


def compiled(names: list[str]) -> Table:
    """Estimates of compiled steps over the true peak, and those of the same steps without torch.compile."""
    from memory_cases import COMPILED

    rows: list[list[object]] = []
    off: list[list[float]] = [[], []]
    for name in names:
        true, ours, eager = (answer(Path(sys.executable), judge, name) for judge in ("truth", "workbench", "eager"))
        ratios = [found["bytes"] / true["bytes"] for found in (ours, eager)]
        for errors, ratio in zip(off, ratios, strict=True):
            errors.append(abs(ratio - 1))
        cells = [f"{ratio:.4f}" for ratio in ratios]
        rows.append([f"{name} ({COMPILED[name].title})", units.bytes_(true["bytes"]), *cells, units.seconds(ours["seconds"])])
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    rows.append(["median error", "", *(units.percent(statistics.median(errors)) for errors in off), ""])
    rows.append(["worst error", "", *(units.percent(max(errors)) for errors in off), ""])
    return Table(
        columns=("case", "true peak", "workbench", "the same eager", "CPU time of the estimate"),
        rows=rows,
        title="Compiled steps: estimate over true peak",
        note=note(),
    )


def beyond(python: Path) -> Table:
    """What cannot be run here."""
    from memory_scale import SCALE

    rows = []
    for name, (title, _) in SCALE.items():
        found = answer(python, "scale", name)
        rows.append([title, found.get("says", found.get("cannot")), units.seconds(found["seconds"]) if "seconds" in found else "–"])
    return Table(columns=("what", "result", "time"), rows=rows, title="Beyond this machine", note=note())


def published(python: Path) -> Table:
    """Ours beside what others have measured on GPUs."""
    from memory_published import FIGURES

    rows, errors = [], []
    for name, figure in FIGURES.items():
        found = answer(python, "published", name)
        for quantity, measured in figure.measured.items():
            said = found.get(quantity)
            if said is None:
                rows.append([name, quantity, units.bytes_(measured), found.get("cannot", "–"), "", figure.source])
                continue
            errors.append(abs(said / measured - 1))
            rows.append(
                [name, quantity, units.bytes_(measured), units.bytes_(said), f"{100 * (said / measured - 1):+.2f} %", figure.source]
            )
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    if errors:
        rows.append(["median error", "", "", "", units.percent(statistics.median(errors)), ""])
        rows.append(["worst error", "", "", "", units.percent(max(errors)), ""])
    return Table(
        columns=("step", "quantity", "measured", "predicted", "error", "source"),
        rows=rows,
        title="Measured by others, on GPUs",
        note=note(),
    )


def note() -> str:
    """Where and when."""
    return f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names; none = all")
    parser.add_argument(
        "--peer-python", type=Path, default=Path(sys.executable), help="a Python that has this one's packages and the peers"
    )
    parser.add_argument("--install", type=Path, metavar="FOLDER", help="make such an environment there, and use it")
    parser.add_argument("--no-published", action="store_true")
    parser.add_argument("--judge", nargs=2, metavar=("TOOL", "CASE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.judge:
        print(json.dumps(judged(*given.judge)))
        return
    from memory_cases import CASES, COMPILED

    python = install(given.install.resolve()) if given.install else given.peer_python
    if eager := [name for name in given.cases or CASES if name in CASES]:
        print(against_the_truth(python, eager))
    if others := [name for name in given.cases or COMPILED if name in COMPILED]:
        print(compiled(others))
    if not given.cases:
        print(beyond(python))
        if not given.no_published:
            print(published(python))


if __name__ == "__main__":
    main()

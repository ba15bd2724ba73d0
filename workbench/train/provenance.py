"""Records what a training depends on beside its spec: versions, devices, switches of torch, the files of its task, the data it read.

A resumed training is compared with what its checkpoint says of these: what does not fit is refused, what has changed is a note.
"""

import ast
import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from workbench.core import run_directory
from workbench.core.package import code_record, imported_sources
from workbench.harness.batches import map_tensors, tensors_of
from workbench.runs.errors import is_out_of_memory
from workbench.runs.spec import IMPLEMENTATIONS
from workbench.runs.task import Task, TaskError, imported
from workbench.runs.training_knobs import is_own_schedule
from workbench.train import named_state
from workbench.train.early_stop import lost_best
from workbench.train.fingerprints import digest
from workbench.train.optimizers import optimizer_class
from workbench.train.random_numbers import seeded
from workbench.train.ranks import changed_layout
from workbench.train.sample_order import SampleOrder
from workbench.train.sharding import POWERSGD_ANEW, changed_buckets
from workbench.train.trainer import Trainer

SAMPLES = 8
"""Samples of the first batch whose content is digested: the same for each micro_batch from 8 on, where seed and ranks are the same."""
_PLAIN = (str, int, float, bool, Path)
_DEEPEST = 8
"""Datasets inside of each other, at most, among which classes are looked for: one may hold itself."""


def record(run_dir: Path, trainer: Trainer, first_batch: Any, *, resumed: bool) -> None:
    """Write ENVIRONMENT: called on rank 0 with the first micro-batch. A run that goes on keeps what it wrote on its data.

    It ends no training: data that cannot be described have the reason as their identity, and a full disk is noticed by what has to be kept.
    """
    path = run_dir / run_directory.ENVIRONMENT
    try:
        data = {**dataset_identity(trainer.loader.dataset), "first samples": digest(map_tensors(_first, first_batch))}
    except Exception as error:
        data = {"not known": f"{type(error).__name__}: {error!s:.200}"}
    if resumed:
        with contextlib.suppress(run_directory.DamagedRunError):
            data = run_directory.read_json(path).get("data", data)
    with contextlib.suppress(OSError):
        run_directory.write_json(
            path, {**environment(trainer.ranks.device), **code_record(_code(trainer.task, trainer.spec.schedule)), "data": data}
        )


def environment(device: torch.device) -> dict[str, Any]:
    """Versions of all imported packages, and what of this machine and of torch's switches changes results or speed."""
    versions = {"python": platform.python_version()}
    for name, module in sorted(sys.modules.items()):
        version = getattr(module, "__dict__", {}).get("__version__")  # not by getattr: a module may warn or import something
        if "." not in name and isinstance(version, str) and name not in sys.stdlib_module_names:
            versions[name] = version
    versions |= {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    cudnn: Any = torch.backends.cudnn
    if cudnn.is_available():
        versions["cudnn"] = str(cudnn.version())
    on_gpu = device.type == "cuda"
    switches = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "products of matrices": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }
    machine = {
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
    }
    names = ("OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF", "PYTHONHASHSEED", "NCCL_ALGO", "NCCL_PROTO")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    return {"versions": versions, "environment": {**machine, **switches, **variables}}


def _cpu() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor()


def code_parts(task: Task, schedule: str) -> dict[str, str]:
    """A digest of each function and class of the files of `_code`, and of the rest; comments and layout do not count."""
    parts = defaultdict[str, str](str, python=platform.python_version())  # which decides how a tree is written
    for file, text in _code(task, schedule).items():
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            for node in ast.parse(text).body:
                parts[f"{getattr(node, 'name', 'top level')} in {file}"] += ast.dump(node)
    return {name: _digest(dumped.encode()) for name, dumped in parts.items()}


def code_changes(was: Any, now: Mapping[str, str]) -> str:
    """Which functions differ between two `code_parts`; "" = none, or it cannot be told, as from a checkpoint of an earlier workbench."""
    if not isinstance(was, Mapping) or was.get("python") != now.get("python"):
        return ""
    before, after = ({name.rpartition(" in ")[2] for name in parts} for parts in (was, now))
    differ = (name for name in sorted({*was, *now}) if was.get(name) != now.get(name))
    changed = [name for name in differ if name.rpartition(" in ")[2] in before & after]  # what is imported late may not be there yet
    return f"the code has changed, and the training continues with the present code: {', '.join(changed)}"[:500] if changed else ""


def _code(task: Task, schedule: str) -> dict[str, bytes]:
    """The content of each file that defines a function of the task, or the schedule if it is the user's own, and of what they import."""
    files = imported_sources()
    own = imported("schedule", schedule) if is_own_schedule(schedule) else None
    for function in (task.model, task.dataset, task.loss, task.optimizer, task.collate, task.evaluate, task.validation, own):
        while isinstance(function, functools.partial):
            function = function.func
        with contextlib.suppress(TypeError, OSError):
            path = Path(inspect.getsourcefile(function) or "")  # type: ignore[arg-type]
            files[path.name] = path.read_bytes()
    return dict(sorted(files.items()))


def code_note(run_dir: Path, task: Task, schedule: str) -> str:
    """A note about files of a run's code that are others now that its steps are repeated; "" = none, or it has not recorded them."""
    try:
        was = run_directory.read_json(run_dir / run_directory.ENVIRONMENT)["code"].items()
    except (run_directory.DamagedRunError, KeyError, TypeError, AttributeError):
        return ""
    now = code_record(_code(task, schedule))["code"]
    changed = ", ".join(name for name, before in was if now.get(name, before) != before)
    return f"the code of {run_dir.name} has changed since it was trained ({changed}), and the present code was repeated" if changed else ""


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def dataset_identity(dataset: Any) -> dict[str, Any]:
    """Type, length, plain attributes and own `fingerprint` (Hugging Face: `_fingerprint`) of a dataset; no sample is read."""
    inside = _inside(dataset)
    identity: dict[str, Any] = {"type": f"{type(inside).__module__}.{type(inside).__qualname__}"}
    if not isinstance(inside, IterableDataset):
        identity["samples"] = len(inside)
    for name in ("fingerprint", "_fingerprint"):
        if isinstance(own := getattr(inside, name, None), str):
            identity["fingerprint"] = own[:200]
            break
    return identity | {f".{name}": value for name, value in _attributes(inside)}


def first_samples(trainer: Trainer, first_batch: Any) -> dict[str, list[Any]] | None:
    """Which samples the first micro-batch of a run has, and a digest of each tensor of their batch; None = its samples have no numbers."""
    order = trainer.loader.sampler
    if not isinstance(order, SampleOrder):
        return None
    begin = SampleOrder(trainer.loader.dataset, rank=order.rank, world_size=order.world_size, seed=order.seed)  # type: ignore[arg-type]
    indices = [int(index) for index in itertools.islice(begin, trainer.loader.batch_size)]
    return {"indices": indices, "digests": [digest(_first(tensor)) for tensor in tensors_of(first_batch)]}


def have_changed(trainer: Trainer, samples: Mapping[str, Sequence[Any]] | None) -> bool:
    """Has the content of a run's `first_samples` changed since? Their batch is read again, up to four times while it differs.

    Random numbers begin otherwise each time and are restored: what differs by itself, as augmented pictures do, is not compared. Where
    the loader has workers, one reads, so that no file is opened in the training process.
    """
    loader, reads = trainer.loader, list[list[str]]()
    with contextlib.suppress(Exception):  # what cannot be read tells so when it is its turn
        while samples and len(reads) < 4:
            again: DataLoader[Any] = DataLoader(
                _inside(loader.dataset),
                batch_sampler=[list(samples["indices"])],
                num_workers=min(1, loader.num_workers),
                collate_fn=loader.collate_fn,
                worker_init_fn=loader.worker_init_fn,
                generator=torch.Generator().manual_seed(len(reads)),
            )
            with seeded(len(reads), trainer.ranks.device):
                reads.append([digest(_first(tensor)) for batch in again for tensor in tensors_of(batch)])
            if not any(len(set(now)) == 1 and now[0] != was for was, *now in zip(samples["digests"], *reads, strict=False)):
                return False
        return bool(samples)
    return False


def refuse_other_optimizer(trainer: Trainer, name: str, state: Mapping[str, Any], source: named_state.Source | None) -> None:
    """Refuse the checkpoint of this name if its content says that its optimizer is another; earlier workbenches do not say its class.

    Raises:
        TaskError: it is of another class, or its groups of parameters are others. Nothing was changed.
    """
    was, now = state.get("optimizer class"), optimizer_class(trainer.optimizer).__name__
    why = ""
    if was and was != now:
        why = f"it has the states of {was!s:.80}, and the optimizer of the run is {now} now"
        again, on = f"make it {was!s:.80} again", f"with {now}"
    elif (source and not source.imported) or (not source and "names" in state):  # what is imported has its own rules
        why = regrouped(
            source.groups if source else named_state.groups_of(state), named_state.optimizer_groups(trainer), exactly=not source
        )
        again, on = "make the groups as they were", "with these groups"
    if why:
        raise TaskError(
            f"the run cannot resume from {name}: {why}. To resume, {again}. To go on {on}, launch a new run that begins with the weights: "
            "wb.export_weights(run, folder), and wb.import_weights(Net(), folder) in the task. Nothing was changed"
        )


def regrouped(its: Sequence[Mapping[str, Any]], mine: Sequence[Mapping[str, Any]], *, exactly: bool = False) -> str:
    """In what an optimizer's groups of parameters differ from those of a checkpoint; "" = they can have the checkpoint's options.

    Groups have `names`. Unless they must be `exactly` alike, groups with the same options count as one, as in another layout of the ranks.
    """
    if [group["names"] for group in its] == [group["names"] for group in mine]:
        return ""
    for groups, others, now, then in ((mine, its, "one group", "two"), (its, mine, "two groups", "one")):
        options = [_options(group) for group in others]
        of = {name: place for place, group in enumerate(others) for name in group["names"]}
        for group in groups:
            places = {of[name]: name for name in reversed(group["names"]) if name in of}
            (first, name), *more = sorted(places.items()) or [(0, "")]
            for place, other in more:
                if differ := options[first].items() ^ options[place].items():
                    option = min(differ)[0]
                    values = f"{option}={options[first].get(option)!s:.40} and {options[place].get(option)!s:.40}"
                    return f"{name} and {other} are in {now} of the optimizer's parameters now, and were in {then} (the two: {values})"
    return f"the optimizer's parameters are in {len(mine)} groups now, and were in {len(its)}, or in another order" if exactly else ""


def _options(group: Mapping[str, Any]) -> dict[str, str]:
    """The options of a group, as text; lr changes from step to step, and initial_lr is the peak."""
    return {name: str(value) for name, value in group.items() if name not in ("names", "params", "lr", *IMPLEMENTATIONS)}


def optimizer_options(trainer: Trainer) -> dict[str, list[Any]]:
    """The options of the optimizer that its class takes, by name, each with its value in each group; lr is the peak."""
    groups, taken = trainer.optimizer.param_groups, inspect.signature(optimizer_class(trainer.optimizer)).parameters.keys() - {"params"}
    keys = {name: "initial_lr" if name == "lr" else name for name in taken & groups[0].keys() - set(IMPLEMENTATIONS)}
    return {name: [group.get(key) for group in groups] for name, key in sorted(keys.items())}


def changes(trainer: Trainer, state: Mapping[str, Any], code: Mapping[str, str], options: Mapping[str, list[Any]]) -> list[str]:
    """In what a training that has resumed differs from what its checkpoint says; `options` are those of before it was loaded."""
    spec, steps, kept = trainer.spec, (state.get("spec") or {}).get("steps"), optimizer_options(trainer)
    layout, buckets = changed_layout(spec, state.get("layout")), changed_buckets(spec, state)
    differ = [name for name in options if options[name] != kept.get(name, options[name])]
    pairs = {name: next(pair for pair in zip(options[name], kept[name], strict=False) if pair[0] != pair[1]) for name in differ}
    unused = ", ".join(f"{name}={now} ({before} is)" for name, (now, before) in pairs.items())
    was, lr = state["scheduler"].get("_last_lr", [trainer.lr])[0], f"the learning rate of step {state['step'] + 1} is {trainer.lr:.3g}"
    notes = (
        code_changes(state.get("code"), code),
        unused and f"the optimizer has the options of the checkpoint; in the task, these are not used: {unused}",
        state.get("origin"),
        layout,
        trainer.compresses and (POWERSGD_ANEW if layout else buckets and f"it goes on with {buckets}: {POWERSGD_ANEW}"),
        trainer.lr != was and f"with steps={spec.steps} ({steps} before) and schedule={json.dumps(spec.schedule)}, {lr}, and was {was:.3g}",
        lost_best(spec.best, state),
    )
    return [*data_changes(trainer, state), *filter(None, notes)]


def data_changes(trainer: Trainer, state: Mapping[str, Any]) -> list[str]:
    """In what a training's data differ from those of a checkpoint, a sentence each; the first samples are read again."""
    notes = []
    before, now = (f"{n:,} samples" if isinstance(n, int) else "no length" for n in (state.get("samples"), sample_count(trainer)))
    if "samples" in state and before != now:
        notes.append(f"the dataset has {now} now, and had {before} before: the order of the samples differs")
    was, is_now = state.get("data") or {}, dataset_identity(trainer.loader.dataset)
    changed = [name for name in was.keys() | is_now.keys() if was.get(name) != is_now.get(name) and name != "samples"] if was else []
    notes += [f"the data's {name} is {is_now.get(name)!r:.80} now, and was {was.get(name)!r:.80} before" for name in sorted(changed)]
    if have_changed(trainer, state.get("first samples")):
        notes.append("the content of the data's first samples differs from before: the training goes on with other data")
    return notes


def mismatch(trainer: Trainer, state: Mapping[str, Any], source: named_state.Source | None = None) -> str:
    """In what a checkpoint differs from the model; "" = it was loaded, by the model's own rules: a buffer may have another shape.

    By name, with a source, it is only compared.
    """
    was, now = state.get("classes"), classes_of(trainer.loader.dataset)
    if was and now and was != now:
        pairs = enumerate(itertools.zip_longest(was, now, fillvalue="none"))
        target, (before, after) = next((target, pair) for target, pair in pairs if pair[0] != pair[1])
        return f"it is of other classes: target {target} was {before!r:.80}, and is {after!r:.80} now"
    if source:
        return named_state.difference(trainer, source)
    try:
        trainer.module.load_state_dict(named_state.versioned(state["module"], trainer.module))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        refused = f"it is of another model: {' '.join(str(error).split()):.200}"
    else:
        return ""
    mine, its = (
        {name: tuple(getattr(weight, "shape", ())) for name, weight in weights.items()}
        for weights in (trainer.module.state_dict(), state["module"])
    )
    more = (f"it is of another model: this one has no {name}" for name in its if name not in mine)
    return named_state.other_shapes(mine, its) or next(more, refused)


def sample_count(trainer: Trainer) -> int | None:
    """Samples of the dataset; None = a stream."""
    dataset = trainer.loader.dataset
    return len(dataset) if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset) else None


def classes_of(dataset: Any, depth: int = 0) -> list[str] | None:
    """The names of a dataset's classes by target, from its `class_to_idx` or `classes`, as torchvision's have; None = it has none.

    A dataset without them that holds another as `.dataset`, or several as `.datasets`, such as torch's Subset and ConcatDataset, has those
    of what it holds: one list of names, or, where the datasets differ, each.
    """
    numbers, names = getattr(dataset, "class_to_idx", None), getattr(dataset, "classes", None)
    if isinstance(numbers, Mapping):
        return sorted(map(str, numbers), key=lambda name: (numbers.get(name, 0), name))
    if isinstance(names, list | tuple):
        return [str(name) for name in names]
    several = getattr(dataset, "datasets", None)
    held = several if isinstance(several, list | tuple) else [getattr(dataset, "dataset", None)]
    lists = [own for part in held if depth < _DEEPEST and part is not None and (own := classes_of(part, depth + 1))]
    return [name for number, own in enumerate(lists) if own not in lists[:number] for name in own] or None


def _inside(dataset: Any) -> Any:
    return getattr(dataset, "dataset", dataset) if type(dataset).__name__ == "SeededBatches" else dataset


def _attributes(dataset: Any) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(getattr(dataset, "__dict__", {}).items())[:40]:
        if isinstance(value, _PLAIN) and not name.startswith("_"):
            yield name, f"{value}"[:200] if isinstance(value, str | Path) else value


def _first(tensor: Tensor) -> Tensor:
    return tensor[:SAMPLES] if tensor.dim() else tensor

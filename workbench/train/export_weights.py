"""Exports a run's checkpoint as safetensors of the Hugging Face hub or for torch.distributed.checkpoint (DCP), and imports such files.

Nothing is executed: a checkpoint is loaded as a resumed run loads it, safetensors files hold tensors
and texts only, and of DCP's index only the fields are read (`dcp`).
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from workbench.core import run_directory
from workbench.core.checks import choice
from workbench.core.synonyms import accept_synonyms
from workbench.runs.export import DCP_INDEX, EXPORTED
from workbench.runs.run import Run
from workbench.train.checkpoints import Checkpoints, part_path
from workbench.train.named_state import Source, versioned, whole_tensors
from workbench.train.ranks import Ranks

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Files of the layout: all weights, or, beside several files, which has which."""
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".json")
"""Of the names of files: a folder with such a name would be taken for one."""
FILE_BYTES = 5_000_000_000
"""Bytes of a file at most, as on the hub."""


@accept_synonyms
def export_weights(
    run: Run | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    average: bool = False,
    best: bool = False,
    config: Any = None,
    file_bytes: int = FILE_BYTES,
    format: Literal["safetensors", "dcp"] = "safetensors",
) -> Path:
    """Write a run's last sound checkpoint into a folder that `from_pretrained` or `dcp.load` reads; return the folder.

    With `format="dcp"`, the folder is a torch.distributed.checkpoint directory with "model" and "optimizer" as `get_state_dict` returns
    them, and with "step", "scheduler", "scaler", "spec" and "ema" if they exist. With `local_sgd`, the optimizer is left out, since each
    rank has its own.

    Args:
        run: a run with checkpoints (`checkpoint_every=`), in any parallel mode, or its directory.
        path: the folder, which is created; a folder that already has weights is refused.
        average: write the averaged weights (`ema=`) instead of the weights.
        best: write the best checkpoint instead of the last one: with `evaluate="checkpoint"` that with the lowest validation loss, or as
            the spec's `best=` says.
        config: a Hugging Face configuration, or a model that has one; it is written into the folder as `config.json`.
        file_bytes: largest size of a safetensors file; more weights go into several files with an index.
        format: "safetensors" or "dcp".

    Raises:
        ValueError: the run has no checkpoint, or no averaged weights, or the folder has weights already or the name of a file.
        DamagedRunError: no checkpoint is usable.
        ImportError: the package safetensors is missing.
    """
    choice("format", format, EXPORTED)
    save = _safetensors("export_weights").save_file if format == "safetensors" else None
    run_dir, folder = Path(run.path if isinstance(run, Run) else run), Path(path).expanduser()
    if folder.suffix in SUFFIXES:
        raise ValueError(f"path={str(path)!r}: give the folder that the files are written into, such as {str(folder.with_suffix(''))!r}")
    if any((folder / name).exists() for name in (ONE_FILE, INDEX, DCP_INDEX)):
        raise ValueError(f"path={str(path)!r}: it has weights already; give another folder")
    checkpoints = _readers(run_dir)
    checkpoint = checkpoints.latest()
    if checkpoint is None:
        raise ValueError(f"{run_dir} has no checkpoint to export: {_no_checkpoint(run_dir)}")
    if best and not (checkpoint := checkpoints.best(checkpoint)):
        raise ValueError(f'best=True: {run_dir} was not validated where checkpoints were written; launch it with evaluate="checkpoint"')
    path_of = functools.partial(part_path, checkpoint[0])
    tensors = whole_tensors(checkpoint[1], path_of, average=average)
    if average and not tensors:
        raise ValueError(f"average=True: {run_dir} keeps no averaged weights; launch it with ema=0.999, or leave average out")
    folder.mkdir(parents=True, exist_ok=True)
    if save:
        _write_safetensors(dict(_distinct(tensors)), folder, file_bytes, save)
    else:
        from workbench.train import dcp  # takes long

        dcp.write(tensors, checkpoint[1], Source(checkpoint[1], path_of), folder)
    if config is not None:
        getattr(config, "config", config).save_pretrained(folder)
    return folder


def _write_safetensors(tensors: Mapping[str, Tensor], folder: Path, file_bytes: int, save: Callable[..., Any]) -> None:
    files = list(_files(tensors, file_bytes))
    names = [ONE_FILE] if len(files) == 1 else [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    for name, content in zip(names, files, strict=True):
        part = folder / f"{name}.part"
        save(content, part, metadata={"format": "pt"})
        part.replace(folder / name)
    if len(files) > 1:
        places = {tensor: name for name, content in zip(names, files, strict=True) for tensor in content}
        total = sum(tensor.nbytes for tensor in tensors.values())
        run_directory.write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


@accept_synonyms
def import_weights(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Load weights in the format of the Hugging Face hub, or of torch.distributed.checkpoint (DCP), into a model by name; return the model.

    A task's `model()` may return the result. In a REPL, Python would print the whole model: write `_ = wb.import_weights(…)`.

    The files do not record the versions of modules (`_version`); the weights are taken to be of the model's own versions.

    Args:
        model: changed in place; in a task's `model()`, all ranks call this, before the model is sharded.
        path: the folder, or one safetensors file.

    Raises:
        ValueError: names or shapes differ, or DCP's index refers to other objects than its own. Nothing was changed or executed.
        FileNotFoundError: there are no weights at this path.
        ImportError: the package safetensors is missing.
    """
    tensors = _read(Path(path).expanduser())
    mine = model.state_dict(keep_vars=True)
    same = {name: other for name, value in mine.items() for other in tensors if other in mine and mine[other] is value}  # tied weights
    missing = [name for name, value in mine.items() if isinstance(value, nn.Parameter) and name not in same]
    strange = [name for name in tensors if name not in mine]
    shapes = [
        f"{name} is {tuple(tensors[name].shape)} there and {tuple(value.shape)} here"
        for name, value in mine.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    if missing or strange or shapes:
        words = [
            f"{len(names)} {what}, such as {names[0]}" for names, what in ((missing, "are missing"), (strange, "are unknown here")) if names
        ]
        raise ValueError(f"{path}: these are weights of another model: {'; '.join([*words, *shapes[:3]])}. Nothing was changed")
    model.load_state_dict(versioned(tensors, model), strict=False)
    return model


def _read(folder: Path) -> dict[str, Tensor]:
    if (folder / DCP_INDEX).exists():
        from workbench.train import dcp  # takes long

        return dcp.read_weights(folder)
    load, paths = _safetensors("import_weights").load_file, [folder]
    if folder.is_dir():
        paths = [folder / ONE_FILE]
        if (folder / INDEX).exists():
            places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            paths = sorted({folder / Path(str(name)).name for name in places.values()})  # never outside
    return {name: tensor for each in paths for name, tensor in load(each).items()}


def last_weights(run_dir: Path) -> dict[str, Tensor]:
    """The weights and buffers of a run's last sound checkpoint by name, whole, whichever way its ranks shared them.

    Raises:
        ValueError: it has none.
        DamagedRunError: none can be used.
    """
    if (checkpoint := _readers(run_dir).latest()) is None:
        raise ValueError(f"{run_dir} has no checkpoint: {_no_checkpoint(run_dir)}")
    return whole_tensors(checkpoint[1], functools.partial(part_path, checkpoint[0]))


def _no_checkpoint(run_dir: Path) -> str:
    """What to do about a run that has none."""
    with contextlib.suppress(OSError, KeyError, run_directory.DamagedRunError):
        if run_directory.read_json(run_dir / run_directory.RUN_JSON)["spec"]["kind"] == "script":
            return "runs of scripts keep their own checkpoints; only a task's can be exported"
    return "launch it with checkpoint_every="


def _readers(run_dir: Path) -> Checkpoints:
    return Checkpoints(run_dir, Ranks(rank=0, world_size=1, device=torch.device("cpu"), store=HashStore()), 1)


def _safetensors(wanted_by: str) -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"wb.{wanted_by} needs the package safetensors: pip install safetensors") from error
    return safetensors.torch


def _distinct(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor once: of two names of a tied weight the first, as the hub has it."""
    seen = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape)
        if not tensor.numel() or place not in seen:
            seen.add(place)
            yield name, tensor.contiguous()


def _files(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    content = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if content and sum(each.nbytes for each in content.values()) + tensor.nbytes > limit:
            yield content
            content = {}
        content[name] = tensor
    yield content

"""Derives the remedies of a slow loader: more or fewer workers, deeper queues, persistent workers, prepared data."""

import dataclasses
from collections.abc import Callable, Iterator

from workbench.core import units
from workbench.core.system_load import affinity
from workbench.data.analysis.format_costs import PREPARED, FormatComparison
from workbench.diagnosis.analysis.evidence import Loading
from workbench.diagnosis.analysis.loader_model import LoaderModel
from workbench.diagnosis.analysis.remedy import MIN_SPEEDUP, Case, Remedy, ceiling, from_formula
from workbench.runs.spec import RunSpec

WORKERS_ERROR = (0.94, 1.12)
"""Measured step over predicted step with another number of workers: the formulas leave out queueing for cores and uneven batches, so they
predict too much more often than too little. Measured on two cores (−14 … +6 %); on many cores less is left out. Ranges get wider or
narrower by it, predictions stay."""
DEEP_PREFETCH = 8
"""Batches per worker: enough for one slow batch in twenty, and four times the memory of torch's own 2."""
SHARED_EPOCH = (
    "Keep the workers from one epoch to the next (persistent_workers=True), and the epoch in shared memory (a tensor of one number with "
    "share_memory_(), or a multiprocessing.Value): the dataset has set_epoch, which workers that stay would not see otherwise."
)
"""What to do where workers are started anew since they would miss the epoch."""
UNKNOWN_TRANSFORM = " (how much of it is reading is not known: give compare_formats your loader's dataset, or transform=)"


def for_loader(case: Case) -> Iterator[Remedy | None]:
    """Changes of the loader that would make the step wait less for it."""
    loading = case.evidence.loading
    if loading is None or case.costs.data.mid < (MIN_SPEEDUP - 1) / MIN_SPEEDUP * case.costs.step:
        return
    if loading.kind != "DataLoader":
        share = case.costs.data.mid / case.costs.step
        yield ceiling(
            case,
            "prefetch",
            "Make batches beside training: in a torch.utils.data.DataLoader with workers, or in a thread that fills a queue.",
            share,
            "waiting for data is gone",
            "memory for the batches that lie ready",
        )
        return
    yield from _workers(case, loading)
    yield from _prefetch(case, loading)
    yield from _prepared(case, loading)


def _workers(case: Case, loading: Loading) -> Iterator[Remedy | None]:
    """The number of workers that the curve recommends, and workers that stay from epoch to epoch."""
    feeding = case.model.feeding
    if feeding is None or loading.stream in ("repeated", "unknown"):  # faster by giving the same samples again: no remedy
        return
    yield (staying := _persistent(case, loading))
    best = feeding.recommend()
    remedy = None if best == loading.num_workers else in_workers(case, best)
    if remedy and remedy.speedup > (MIN_SPEEDUP * staying.speedup if staying else 1.0):
        yield remedy


def in_workers(case: Case, best: int) -> Remedy | None:
    """Another number of workers, if that is predicted to help."""
    loading, feeding, model = case.evidence.loading, case.model.feeding, case.model
    if loading is None or feeding is None:
        return None
    keep = {"persistent_workers": True} if best and not loading.persistent_workers and not loading.misses_epochs else {}
    change = {"num_workers": best, **keep}
    speedups = model.with_cores(**change)
    processes = f"{best} worker process{'es' * (best != 1)}"
    size = f"{units.bytes_(loading.batch_bytes * (2 * best + 1))} of " if loading.batch_bytes else ""
    instead = f", instead of {loading.num_workers}." if loading.num_workers else ", beside training."
    return from_formula(
        case,
        f"num_workers={best}",
        change,
        (f"Make batches in {processes}{instead}" if best else f"Make batches in the training process, without workers{instead}")
        + (" Keep them from one epoch to the next." if keep else "")
        + _typed(case, best, loading.persistent_workers or bool(keep), feeding.cores),
        speedups.mid,
        (WORKERS_ERROR[0] * speedups.mid / speedups.high, WORKERS_ERROR[1] * speedups.mid / speedups.low),
        _formula(feeding, best),
        f"{size}shared memory for batches, and a process for each worker" if best else "",
        most=model.most_of_workers(**change),
    )


def _typed(case: Case, workers: int, staying: bool, cores: float) -> str:
    """What to type into a program of one's own."""
    if isinstance(case.spec, RunSpec) or not workers:
        return ""
    more = ""
    if workers > len(affinity()):
        more = " Torch warns that these are more workers than cores, but workers that only wait need none."
    elif workers >= cores + 0.1:
        more = f" That is more than the cores that are free now ({cores:.1f}); workers that only wait need none."
    return f" DataLoader(…, num_workers={workers}{', persistent_workers=True' * staying}).{more}"


def _persistent(case: Case, loading: Loading) -> Remedy | None:
    """Workers that are not started anew for each epoch."""
    if not loading.num_workers or loading.persistent_workers or not loading.start_up:
        return None
    keep = {"persistent_workers": True}
    return from_formula(
        case,
        "epoch in shared memory" if loading.misses_epochs else "persistent_workers=True",
        {} if loading.misses_epochs else keep,
        SHARED_EPOCH if loading.misses_epochs else "Keep the workers from one epoch to the next.",
        case.model.speedup(**keep),
        WORKERS_ERROR,
        f"starting them takes {units.seconds(loading.start_up)} per epoch of {loading.epoch} batches, and is gone",
        "their memory between epochs; the dataset's own state lives on in them",
    )


def _formula(f: LoaderModel, workers: int) -> str:
    if not workers:
        return f"loader + training = {units.seconds(f.loader(0))} + {units.seconds(f.compute)} per batch"
    made = (f.worker_cpu if f.worker_cpu is not None else f.cpu) + f.blocked
    terms = (
        f"a worker's batch {units.seconds(made)} / {workers}",
        f"training {units.seconds(f.compute)} + hand-over {units.seconds(f.handover)}",
        f"all CPU over {f.cores:.1f} cores",
    )
    return f"the largest of: {'; '.join(terms)}; {f.binds(workers)} decides"


def _prefetch(case: Case, loading: Loading) -> Iterator[Remedy | None]:
    """A deeper queue evens out batches of uneven length: the mean counts, not the slowest."""
    now = loading.prefetch_factor or 2
    if not loading.num_workers or now >= DEEP_PREFETCH or case.model.feeding is None:
        return
    if not case.judgement.cause.startswith(("prefetch", "slow samples")):
        return
    plain = LoaderModel.of(case.evidence)
    if plain is None:
        return
    even = plain.step(loading.num_workers, prefetch_factor=DEEP_PREFETCH, persistent_workers=loading.persistent_workers)
    step = max(even, case.costs.cached) + case.costs.stalls.mid
    speedup = case.costs.step / step
    yield from_formula(
        case,
        f"prefetch_factor={DEEP_PREFETCH}",
        {"prefetch_factor": DEEP_PREFETCH},
        f"Let each worker keep {DEEP_PREFETCH} batches ready instead of {now}, so that a slow one is made up for by the others.",
        speedup,
        (1.0, 1 + 0.6 * (speedup - 1)),
        f"the step at the loader's mean speed: {units.seconds(even)}",
        f"{units.bytes_(loading.batch_bytes * loading.num_workers * (DEEP_PREFETCH - now))} more of shared memory",
    )


def _prepared(case: Case, loading: Loading) -> Iterator[Remedy | None]:
    """Work done once, beforehand, instead of in every epoch: ceilings, as if nothing of it remained, but where formats were compared what
    remains is measured.
    """
    feeding, cause = case.model.feeding, case.judgement.cause
    if feeding is None:
        return
    made = (loading.cpu if loading.cpu is not None else loading.worker_cpu) or 1e-12
    compared = case.evidence.formats
    waiting, preparing = (compared.left_of_waiting(), compared.left_of_cpu()) if compared else (None, None)
    left_waiting, left_cpu = waiting or 0.0, preparing or 0.0
    least, most = _saved_by_copy(loading, compared)
    copied, at_best = (
        dataclasses.replace(_less_cpu(feeding, seconds / made), blocked=feeding.blocked * left_waiting) for seconds in (least, most)
    )
    drawn = min(sum(share for _, share in loading.random_lines), (loading.fetch_cpu or 0.0) / made)
    fixed = max(0.0, (loading.fetch_cpu or 0.0) / made - drawn)
    also = f", and {_from_to(least / made, most / made)} of the CPU of making a batch" if most > 0 else ""
    unknown = "" if compared is None or most - least < (MIN_SPEEDUP - 1) * made else UNKNOWN_TRANSFORM
    whole = loading.tensors
    options = (
        (
            ("storage", "slow samples"),
            "faster storage",
            "Copy the data to a local disk or into memory before training, or read it in large sequential pieces (shards).",
            copied,
            f"{units.percent(1 - left_waiting)} of the waiting for storage{also} is gone{unknown}",
            "disk space, and the time to copy",
        ),
        (
            ("small files",),
            "shards",
            "Pack the small files into a few large ones (tar with an index), and read those.",
            copied,
            f"{units.percent(1 - left_waiting)} of the waiting for files{also} is gone{unknown}",
            "a second copy of the data",
        ),
        (
            ("dataset code",) if whole else (),
            "whole batches",
            "Take whole batches instead of single samples: DataLoader(dataset, batch_size=None, sampler=loader.batch_sampler), where "
            "loader is the present one, indexes the tensors once per batch.",
            _less_cpu(feeding, ((loading.fetch_cpu or 0.0) + (loading.collate or 0.0)) / made),
            "all that is done sample by sample is gone, collating included",
            "",
        ),
        (
            ("dataset code", "oversubscribed", "slow samples")[whole:],
            "prepared data",
            _cheaper(loading, lambda share: 1 / max(1e-3, 1 - _saved(case, _less_cpu(feeding, min(share, fixed)), loading))),
            _less_cpu(feeding, fixed * (1 - left_cpu)),
            f"{units.percent(1 - left_cpu)} of the dataset's CPU{' that is not random' * bool(drawn)}, {units.percent(fixed)} of making a "
            "batch, is gone",
            "disk space (for decoded pictures about 14 times that of JPEG); what is random, such as augmentation, has to stay",
        ),
        (
            ("dataset code", "oversubscribed", "slow samples") if drawn else ("random",),
            "cheaper augmentation",
            f"Make the random part in {', '.join(line for line, _ in loading.random_lines)} cheaper: it cannot be done beforehand. Resize "
            "the samples before it, do it on whole batches on the GPU, or take fewer or simpler operations.",
            _less_cpu(feeding, drawn),
            f"the lines that draw random numbers, {units.percent(drawn)} of making a batch, are gone",
            "other pictures: augmentation of smaller ones is not the same",
        ),
        (
            ("collate",),
            "faster collate_fn",
            "Write batches into one tensor made beforehand, or pad and stack on whole arrays instead of sample by sample.",
            _less_cpu(feeding, (loading.collate or 0.0) / made),
            "all of collate_fn is gone",
            "",
        ),
    )
    for causes, name, what, better, formula, costs in options:
        measured = compared is not None and (preparing if name == "prepared data" else waiting) is not None
        if cause.startswith(causes) and measured and name not in ("whole batches", "faster collate_fn", "cheaper augmentation"):
            assert compared is not None
            speedup = 1 / max(1e-3, 1 - _saved(case, better, loading))
            high = 1 / max(1e-3, 1 - _saved(case, at_best if better is copied else better, loading))
            formula = f"{formula}, as measured in the format {PREPARED if name == 'prepared data' else compared.best}"
            if loading.batch_size and loading.batch_size != compared.batch_size:
                formula += f" with {compared.batch_size} samples read at once (the loader reads {loading.batch_size}: give batch_size=)"
            yield from_formula(case, name, {}, what, speedup, (WORKERS_ERROR[0] * speedup / high, WORKERS_ERROR[1]), formula, costs)
        elif cause.startswith(causes):
            yield ceiling(case, name, what, _saved(case, better, loading), formula, costs)


MIN_LINE = 0.25
"""Share of the time of making a batch from which on the advice names a line of the dataset. Chosen: a change there gains something."""


def _cheaper(loading: Loading, without: Callable[[float], float]) -> str:
    """How making samples gets cheaper: at the dataset's heaviest line that is not random, if one is known.

    `without` gives the throughput over that of now if a fraction of the CPU of making a batch were gone.
    """
    fixed = next((item for item in loading.slow_lines if item not in loading.random_lines), None)
    if fixed and fixed[1] >= MIN_LINE:
        return (
            f"Make {fixed[0]} cheaper (of the time of a batch, {loading.within(fixed[0])}; if that cost nothing, "
            f"{units.times(without(loading.function_share(fixed[0])))}): work on whole arrays instead of loops, compute once what is the "
            "same for all samples, and do once, beforehand, what each epoch repeats and is not random (decode, resize, tokenize), and "
            "store it as arrays."
        )
    return (
        "Do once, beforehand, what each epoch repeats and is not random (decode, resize, tokenize, compute), and store it as arrays; or "
        "make it faster."
    )


def _saved_by_copy(loading: Loading, compared: FormatComparison | None) -> tuple[float, float]:
    """Seconds of the dataset's CPU per batch that a copy in the best format saves: (least, most); negative where it takes more."""
    left = compared.left_of_reading() if compared else None
    if compared is None or left is None:
        return 0.0, 0.0
    least, most = (reading * (1 - left) for reading in compared.reading_cpu(loading.fetch_cpu or 0.0, loading.batch_size))
    return min(least, most), max(least, most)


def _from_to(low: float, high: float) -> str:
    """Two fractions as percentages, or one where they are alike."""
    texts = [units.percent(max(0.0, value)) for value in (low, high)]
    return texts[1] if texts[0] == texts[1] else f"{texts[0]} to {texts[1]}"


def _less_cpu(feeding: LoaderModel, share: float) -> LoaderModel:
    """The loader without a share of the CPU of making a batch here; a worker, which also sends it, saves the same seconds."""
    by = max(0.0, 1 - share)
    worker = None if feeding.worker_cpu is None else max(0.0, feeding.worker_cpu - feeding.cpu * (1 - by))
    return dataclasses.replace(feeding, cpu=feeding.cpu * by, worker_cpu=worker)


def _saved(case: Case, better: LoaderModel, loading: Loading) -> float:
    """Fraction of the step that a faster loader saves: of the waiting that was measured, the share that the formula says is gone.

    Beside training the same loader takes longer than alone, and training after a pause, too (measured: 47 ms of waiting for a loader that
    takes 45), and beside other processes several times as long: that goes with the waiting, as in the table of the parts.
    """
    c, now = case.costs, case.model.feeding
    assert now is not None
    waits, then = (
        loader.data_wait(loading.num_workers, prefetch_factor=loading.prefetch_factor or 2, persistent_workers=loading.persistent_workers)
        for loader in (now, better)
    )
    gone = max(0.0, 1 - then / waits) if waits > 0 else 0.0
    return c.data.mid * gone / c.step

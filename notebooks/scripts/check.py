"""Answers to the exercises: `check.biggest(run, answer)` says right or wrong, and why; `claims` checks measurements."""

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from scripts import predict
from workbench import Diagnosis, Run, WhyNotLinear
from workbench.core import units
from workbench.core.vocabulary import PHASES


def _say(answer: object, right: bool, because: str, hint: str, among: Collection[object] = ()) -> None:
    """Whether an answer is right; `among`: the choices, if there are some."""
    if answer is None:
        print("Your turn: put your answer in place of None and run the cell again.")
    elif among and answer not in among:
        print(f"{answer!r} is not among the choices: {', '.join(map(repr, among))}.")
    else:
        print(f"Right: {because}" if right else f"Not yet: {hint}")


class Again(str):
    """The message of a measurement that did not come out as the text says; `claims` knows it by its type."""


def again(expected: str, *measured: object, timed: bool = True) -> Again:
    """The message of a measurement that did not come out as the text says.

    >>> again("input-bound", 0.25)
    'expected: input-bound. Measured: 0.25. A busy machine does that: run the measurement again when nothing else computes'

    Args:
        expected: what the text says.
        measured: what came out.
        timed: does it depend on how busy the machine is? An accuracy does not.
    """
    why = (
        "A busy machine does that: run the measurement again when nothing else computes"
        if timed
        else "Another processor or version of torch rounds differently, and trainings end elsewhere"
    )
    return Again(f"expected: {expected}. Measured: {', '.join(map(str, measured)).rstrip('.')}. {why}")


@contextlib.contextmanager
def claims() -> Iterator[None]:
    """What the text claims of a measurement is checked inside. Where it does not hold, a note says what was measured, and you can go on.

    In CI (where the variable CI is set) it is an error. So it is everywhere if something else fails than an assertion with `again`.
    """
    try:
        yield
    except AssertionError as error:
        if os.environ.get("CI") or not isinstance(next(iter(error.args), None), Again):
            raise
        print(f"This time it is not as the text says, and you can go on: {error}.")


def provable(diagnosis: Diagnosis | WhyNotLinear) -> bool:
    """Whether a diagnosis has a remedy that can be tried here. On a busy machine it may have none, or recommend none."""
    return getattr(diagnosis, "verdict", "") != "inconclusive" and any(remedy.provable for remedy in diagnosis.remedies)


def _judge(
    written: Callable[..., Any],
    truth: Callable[..., Any],
    cases: Sequence[Mapping[str, Any]],
    because: str,
    hint: str,
    tolerance: float = 0.01,
) -> None:
    """Compare what a function of the reader returns with the truth in some cases; numbers may be off by a share, `tolerance`.

    It prints "Right: why", or "Not yet" with the first case in which it is wrong; "Your turn" where the function returns None in the first.
    """
    for case in cases:
        expected = truth(**case)
        given = ", ".join(f"{name}={_shown(value)}" for name, value in case.items())
        try:
            named = set(inspect.signature(written).parameters) == set(case)
            answer = written(**case) if named else written(*case.values())  # its parameters may have other names
        except Exception as error:  # of the reader's code: it is an answer, too
            print(f"Not yet: with {given} yours raises {type(error).__name__}: {error}")
            return
        if answer is None and case is cases[0]:
            print("Your turn: write the function and run the cell again.")
            return
        if not _same(answer, expected, tolerance):
            print(f"Not yet: with {given} yours gives {_shown(answer)}, and right is {_shown(expected)}. {hint}")
            return
    print(f"Right: {because}")


def _same(answer: Any, expected: Any, tolerance: float) -> bool:
    """Whether an answer is the expected one: numbers to a tolerance, sequences and mappings item by item."""
    answer = answer.tolist() if hasattr(answer, "tolist") else answer  # an array or a tensor
    if isinstance(expected, Mapping):
        return (
            isinstance(answer, Mapping)
            and set(answer) == set(expected)
            and all(_same(answer[key], value, tolerance) for key, value in expected.items())
        )
    if isinstance(expected, str | bool):
        return bool(answer == expected)
    if isinstance(expected, Sequence):
        return (
            isinstance(answer, Sequence)
            and len(answer) == len(expected)
            and all(_same(one, other, tolerance) for one, other in zip(answer, expected, strict=True))
        )
    try:
        return math.isclose(float(answer), float(expected), rel_tol=tolerance, abs_tol=1e-9)
    except (TypeError, ValueError):
        return False


def _shown(value: Any) -> str:
    """A value as a message shows it: 0.04, [1, 2], 0.333."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_shown(item)}' for key, item in value.items())}}}"
    return repr(value)


def biggest(run: Run, answer: str | None) -> None:
    """Notebook 01: which phase takes the largest share of the step?"""
    shares = {phase: sum(t.share(phase) for t in run.timelines) for phase in PHASES}
    longest = [phase for phase in PHASES if shares[phase] > 0.9 * max(shares.values())]  # near ones change places from run to run
    because = f"{longest[0]} is the longest part." if len(longest) == 1 else f"{' and '.join(longest)} are about equally long."
    hint = f"add up each part over all ranks; the parts are {', '.join(PHASES)}."
    _say(answer, answer in longest, because, hint, PHASES)


def bound(before: Run, after: Run, answer: str | None) -> None:
    """Notebook 01: does loading (answer "data") or computing (answer "compute") set the pace of the second run?"""
    compute = max(t.without("data_wait").mean() for t in before.timelines)
    step = max(t.mean() for t in after.timelines)
    truth = "data" if step > 1.3 * compute else "compute"
    because = f"its step takes {units.seconds(step)}, and computing alone took {units.seconds(compute)}."
    _say(answer, answer == truth, because, "how long is its step, and how long did the first run compute?", ("data", "compute"))


def gain_without(written: Callable[..., Any]) -> None:
    """Notebook 01: how much faster the step gets when a part of it is taken out, from the parts of some steps."""
    steps = [{"data_wait": 0.1, "forward": 0.02, "backward": 0.03}, {"data_wait": 0.0, "forward": 0.03, "backward": 0.02}]

    def truth(steps: list[dict[str, float]], part: str) -> float:
        whole = sum(sum(step.values()) for step in steps)
        return whole / (whole - sum(step[part] for step in steps))

    cases = [{"steps": steps, "part": "data_wait"}, {"steps": steps, "part": "forward"}]
    hint = "Add up the seconds of all steps first: a mean of ratios counts a short step as much as a long one."
    _judge(written, truth, cases, "the time of all steps over what is left of it.", hint)


gain_without.wrong = (  # type: ignore[attr-defined]
    lambda steps, part: sum(sum(step.values()) / (sum(step.values()) - step[part]) for step in steps) / len(steps),
    lambda steps, part: sum(sum(step.values()) for step in steps) / sum(step[part] for step in steps),
)


def step_with_workers(written: Callable[..., Any]) -> None:
    """Notebook 01: seconds of a step with workers, from what was measured without."""
    cases = [
        {"compute": 0.040, "wait": 0.140, "processor": 0.050, "workers": 2, "cores": 1},
        {"compute": 0.040, "wait": 0.140, "processor": 0.050, "workers": 8, "cores": 2},
        {"compute": 0.040, "wait": 0.140, "processor": 0.120, "workers": 8, "cores": 1},
    ]
    hint = "A step is as long as the slowest of three: computing, the batch from its workers, and all the work for the processors."
    _judge(written, predict.step_with_workers, cases, "the largest of the three decides, and which that is changes with the workers.", hint)


step_with_workers.wrong = (  # type: ignore[attr-defined]
    lambda compute, wait, processor, workers, cores: compute + wait / workers,
    lambda compute, wait, processor, workers, cores: max(compute, wait / workers),
)


def waiting_for_others(written: Callable[..., Any]) -> None:
    """Notebook 01: how long each rank stands still at the next exchange, from how long each waited for its batch."""

    def truth(data_wait: list[float]) -> list[float]:
        return [max(data_wait) - own for own in data_wait]

    cases = [{"data_wait": [0.030, 0.010]}, {"data_wait": [0.002, 0.050, 0.010]}]
    _judge(written, truth, cases, "all leave together, with the last.", "An exchange begins when the last rank has arrived.")


waiting_for_others.wrong = (lambda data_wait: list(data_wait), lambda data_wait: max(data_wait))  # type: ignore[attr-defined]


def most_speedup(written: Callable[..., Any]) -> None:
    """Notebook 00: how much faster a step can get at best when a share of it goes away."""
    hint = "What is left of a step of 100 ms when the share is gone? Old over new."
    cases = [{"share": 0.5}, {"share": 0.8}, {"share": 0.05}]
    _judge(written, lambda share: 1 / (1 - share), cases, "1 / (1 - share): old over what is left.", hint)


most_speedup.wrong = (lambda share: 1 + share, lambda share: 1 / share)  # type: ignore[attr-defined]


def workers_needed(written: Callable[..., Any]) -> None:
    """Notebook 02: from how many workers on training sets the pace, if making a batch is all waiting."""

    def truth(wait: float, training: float) -> int:
        return math.ceil(wait / training - 1e-9)

    cases = [{"wait": 0.090, "training": 0.040}, {"wait": 0.080, "training": 0.040}, {"wait": 0.010, "training": 0.040}]
    _judge(written, truth, cases, "n workers hand over a batch every wait / n.", "How often do n workers hand over a batch?", 1e-6)


workers_needed.wrong = (lambda wait, training: wait // training, lambda wait, training: wait / training)  # type: ignore[attr-defined]


def shortest_step(written: Callable[..., Any]) -> None:
    """Notebook 02: seconds of the shortest step, if loading and training both compute, on so many cores."""

    def truth(loading: float, training: float, cores: int) -> float:
        return max((loading + training) / cores, training)

    cases = [
        {"loading": 0.090, "training": 0.040, "cores": 2},
        {"loading": 0.090, "training": 0.040, "cores": 16},
        {"loading": 0.090, "training": 0.040, "cores": 1},
    ]
    hint = "Add up all the work of one step; the cores share it. But training itself runs on one of them."
    _judge(written, truth, cases, "all the work of a step, shared by the cores, and never less than the training.", hint)


shortest_step.wrong = (  # type: ignore[attr-defined]
    lambda loading, training, cores: (loading + training) / cores,
    lambda loading, training, cores: max(loading / cores, training),
)


def hidden_steps(written: Callable[..., Any]) -> None:
    """Notebook 02: for how many steps a full queue hides that its loader is too slow."""

    def truth(queue: int, service: float, training: float) -> float:
        return queue / (1 - training / service) if training < service else math.inf

    cases = [
        {"queue": 16, "service": 0.025, "training": 0.010},
        {"queue": 8, "service": 0.020, "training": 0.019},
        {"queue": 16, "service": 0.010, "training": 0.025},
    ]
    hint = "In a step of the training, how many batches leave the queue, and how many arrive? If none is lost, return math.inf."
    _judge(written, truth, cases, "each step takes one batch and training / service of one arrive.", hint, 0.05)


hidden_steps.wrong = (lambda queue, service, training: queue,)  # type: ignore[attr-defined]


def mean_step(written: Callable[..., Any]) -> None:
    """Notebook 03: the mean step in seconds, if it pauses every so many steps."""

    def truth(step: float, pause: float, every: int) -> float:
        return step + pause / every

    cases = [{"step": 0.009, "pause": 0.080, "every": 20}, {"step": 0.009, "pause": 0.080, "every": 100}]
    _judge(written, truth, cases, "each step bears its share of the pause.", "How long do `every` steps take together?")


def next_share(written: Callable[..., Any]) -> None:
    """Notebook 03: the share that a second bottleneck has of the step when the first is gone."""

    def truth(first: float, second: float) -> float:
        return second / (1 - first)

    cases = [{"first": 0.6, "second": 0.2}, {"first": 0.1, "second": 0.3}]
    _judge(
        written, truth, cases, "it takes as long as before, of a shorter step.", "What is left of a step of 100 ms, and what is its part?"
    )


next_share.wrong = (lambda first, second: second, lambda first, second: second - first)  # type: ignore[attr-defined]


def culprit(guess: str | None, found: str) -> None:
    """Notebooks 03, 11, 12 and 18: is the guess what makes it slow?"""
    _say(guess, guess == found, f"{found}.", f"it is {found}: the output above says why.")


def saves_most(guess: str | None, totals: Mapping[str, int]) -> None:
    """Notebook 04: which of some changes leaves the least memory?"""
    least = min(totals, key=totals.__getitem__)
    because = f"{units.bytes_(totals[least])} are left with it."
    _say(guess, guess == least, because, "look at what is largest at the peak, and at which change makes it smaller.", totals)


def times_fewer(guess: float | None, measured: float) -> None:
    """Notebook 05: how many times fewer steps 64 times the batch takes; the nearest of 2, 6, 20 and 64 is right."""
    nearest = min((2, 6, 20, 64), key=lambda choice: abs(math.log(choice / measured)))
    said = f"it was {units.times(measured)} fewer"
    _say(guess, guess == nearest, f"{said}.", f"{said}: from some batch on, more samples tell a step nothing new.", (2, 6, 20, 64))


def samples_per_sec(written: Callable[..., Any]) -> None:
    """Notebook 05, exercise 1: samples per second of a batch, if a step has a fixed part and a part for each sample."""
    cases = [{"batch": batch, "fixed": 0.002, "per_sample": 1e-5} for batch in (16, 200, 100_000)]
    because = "batch over the seconds of a step. A large batch pays the fixed part once for many samples."
    _judge(written, lambda batch, fixed, per_sample: batch / (fixed + batch * per_sample), cases, because, "How long is one step?")


def steps_and_samples(written: Callable[..., Any]) -> None:
    """Notebook 05, exercise 2: steps and samples to the target by the law of the critical batch."""

    def law(batch: int, s_min: float, b_crit: float) -> tuple[float, float]:
        return s_min * (1 + b_crit / batch), s_min * (batch + b_crit)

    cases = [{"batch": batch, "s_min": 60, "b_crit": 100} for batch in (16, 100, 1024)]
    because = "at the critical batch, steps and samples are both twice the least possible."
    _judge(written, law, cases, because, "Steps are s_min (1 + b_crit / B); samples are B times as many.")


def ready_first(written: Callable[..., Any]) -> None:
    """Notebook 05, exercise 3: the batch that reaches the target first, by the law and samples per second."""

    def best(rates: Mapping[int, float], s_min: float, b_crit: float) -> int:
        return min(rates, key=lambda batch: s_min * (batch + b_crit) / rates[batch])

    full, empty = {16: 900.0, 64: 1000.0, 256: 1010.0}, {16: 1000.0, 64: 3900.0, 256: 15000.0, 1024: 20000.0}
    cases = [{"rates": rates, "s_min": 60, "b_crit": 100} for rates in (full, empty)]
    because = "a device that 16 samples fill wants a batch of 16; one that they leave empty wants a larger one."
    _judge(written, best, cases, because, "The time is samples to the target, over samples per second.")


def rescued(guess: str | None, trained: Sequence[int]) -> None:
    """Notebook 06: at which of the batches 256 and 512 a warm-up rescues the linear rule: "both", "256 only" or "neither"."""
    truth = "both" if len(trained) == 2 else "256 only" if 256 in trained else "512 only" if trained else "neither"
    hint = f"{truth}: a warm-up changes the first steps, and this rate is kept until the end."
    _say(guess, guess == truth, f"{truth}.", hint, ("both", "256 only", "512 only", "neither"))


def damped(written: Callable[..., Any]) -> None:
    """Notebook 06, exercise 1: a learning rate for another batch by the damped rule."""

    def rule(lr: float, batch: int, to_batch: int, noise: float) -> float:
        return lr * (1 + noise / batch) / (1 + noise / to_batch)

    cases = [{"lr": 0.1, "batch": 100, "to_batch": to_batch, "noise": noise} for to_batch, noise in ((400, 300), (100, 50), (10**6, 300))]
    because = "far below the noise it is the linear rule, and however large the batch, it never passes lr (1 + noise / batch)."
    _judge(written, rule, cases, because, "What are 1 + noise / batch before and after?")


def steepest(written: Callable[..., Any]) -> None:
    """Notebook 06, exercise 2: the learning rate at which the loss falls fastest, by its logarithm or by the rate itself."""

    def truth(lrs: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
        falls = [(b - a, low, high) for a, b, low, high in zip(losses, losses[1:], lrs, lrs[1:], strict=False)]
        by_log = min(falls, key=lambda fall: fall[0] / math.log(fall[2] / fall[1]))
        by_rate = min(falls, key=lambda fall: fall[0] / (fall[2] - fall[1]))
        return by_log[1], by_rate[1]

    cases = [
        {"lrs": [1e-4, 1e-3, 1e-2, 1e-1, 1.0], "losses": [2.3, 2.29, 2.2, 1.5, 2.6]},
        {"lrs": [0.01, 0.02, 0.1, 0.2], "losses": [2.0, 1.9, 1.2, 1.1]},
        {"lrs": [0.01, 0.02, 0.03, 0.3], "losses": [2.0, 1.95, 1.6, 0.9]},
    ]
    because = "a slope over the rate itself is divided by small numbers on the left, so it favours rates that are far too small."
    _judge(written, truth, cases, because, "Take the slope between neighbours, and return the left learning rate of the lowest slope.")


steepest.wrong = (  # type: ignore[attr-defined]
    lambda lrs, losses: (min(zip(lrs, losses, losses[1:], strict=False), key=lambda pair: pair[2] - pair[1])[0], lrs[0]),
)


def warmup(written: Callable[..., Any]) -> None:
    """Notebook 06, exercise 3: steps of a warm-up of five epochs, but of a tenth of the run at most."""

    def truth(dataset: int, batch: int, steps: int) -> int:
        return min(math.ceil(5 * dataset / batch), steps // 10)

    cases = [
        {"dataset": 1_281_167, "batch": 8192, "steps": 14_000},
        {"dataset": 8000, "batch": 256, "steps": 125},
        {"dataset": 8000, "batch": 512, "steps": 10_000},
    ]
    because = "five epochs of ImageNet fit into its 90; five epochs of a short run are longer than the run."
    _judge(written, truth, cases, because, "An epoch is dataset / batch steps, rounded up after the multiplication by five.")


def fails_at(guess: int | None, failed: list[int]) -> None:
    """Notebook 06: from which batch on does linear scaling fail?"""
    if not failed:
        print("It failed with none of these batches this time: run the measurement again.")
        return
    _say(guess, guess == min(failed), f"{min(failed):,} is the first.", f"it first fails at {min(failed):,}.")


def spend(exponent: float, answer: str | None) -> None:
    """Notebook 07: where more compute belongs, if the best size grows with this power of it: "model", "data" or "both" alike?"""
    best = "model" if exponent > 0.6 else "data" if exponent < 0.4 else "both"
    because = f"ten times the compute: {10**exponent:.1f} times the model, {10 ** (1 - exponent):.1f} times the data."
    _say(answer, answer == best, because, "N_opt grows as C^a, and D_opt as C^(1-a); what is a?", ("model", "data", "both"))


def speedup(guess: float | None, measured: float) -> None:
    """Notebook 09: how many times the throughput of one process two reach; a guess within a fifth is good on a busy machine."""
    right = guess is not None and abs(guess / measured - 1) < 0.2
    _say(guess, right, f"it was {units.times(measured)}.", f"it was {units.times(measured)}; where did the rest go?")


def tokens(guess: float | None, measured: float, naive: float) -> None:
    """Notebook 09: million tokens per second of 64 GPUs; better than the naive line is right."""
    right = guess is not None and abs(guess - measured) < abs(naive - measured)
    said = f"{measured:.2f} million were measured, and the naive line says {naive:.2f}"
    _say(guess, right, f"{said}.", f"{said}: by how much did each GPU fall behind at each doubling?")


def efficiency(written: Callable[..., Any]) -> None:
    """Notebook 09, exercise 1: throughput per process, over that of the smallest number of processes."""

    def truth(rates: Mapping[int, float]) -> dict[int, float]:
        first = min(rates)
        return {n: rate / n * first / rates[first] for n, rate in rates.items()}

    cases = [{"rates": {1: 100.0, 2: 190.0, 4: 320.0}}, {"rates": {8: 1210.0, 16: 2330.0, 32: 4380.0}}]
    because = "the smallest number has 1. What is missing from 1 is what scaling costs."
    _judge(written, truth, cases, because, "Divide each rate by its number of processes, then by the same of the smallest.")


def linear(written: Callable[..., Any]) -> None:
    """Notebook 09, exercise 2: the linear extrapolation from the largest number of processes."""
    cases = [{"rates": {8: 1210.0, 16: 2330.0, 32: 4380.0}, "n": n} for n in (64, 1024)]
    because = "it assumes that efficiency falls no further than at the last point."
    _judge(
        written, lambda rates, n: n * rates[max(rates)] / max(rates), cases, because, "What does one process reach in the largest point?"
    )


def strong(written: Callable[..., Any]) -> None:
    """Notebook 09, exercise 3: seconds of a step in strong scaling, and its speedup."""

    def truth(divided: float, fixed: float, n: int) -> tuple[float, float]:
        return divided / n + fixed, (divided + fixed) / (divided / n + fixed)

    cases = [{"divided": 0.9, "fixed": 0.1, "n": n} for n in (1, 9, 1000)]
    because = "1,000 processes are not even ten times as fast: the fixed tenth stays."
    _judge(written, truth, cases, because, "Divide what is divided, and add what is not.")


def energy(guess: float | None, ratio: float) -> None:
    """Notebook 09: how many times the energy 128 times the GPUs take; the nearest of 1, 2, 11 and 128 is right."""
    nearest = min((1, 2, 11, 128), key=lambda choice: abs(math.log(choice / ratio)))
    said = f"{units.times(ratio)} the energy"
    _say(
        guess,
        guess == nearest,
        f"{said}.",
        f"{said}: the work is the same, and what grows is what the GPUs draw while they wait.",
        (1, 2, 11, 128),
    )


def share_of(guess: float | None, share: float) -> None:
    """Notebook 08: is a guessed share right to 0.15?"""
    right = guess is not None and abs(guess - share) < 0.15
    _say(guess, right, f"it is {units.percent(share)}.", f"it is {units.percent(share)}: each picture takes operators of its own.")


def slowdown(guess: float | None, factor: float) -> None:
    """Notebook 10: how many times as long a step takes over 100 Mbit/s; the nearest of 1.1, 2, 5 and 40 is right."""
    nearest = min((1.1, 2, 5, 40), key=lambda choice: abs(math.log(choice / factor)))
    said = f"{units.times(factor)} as long"
    _say(guess, guess == nearest, f"{said}.", f"{said}: 2.6 MB are 21 Mbit. How long do they take at 100 Mbit/s?", (1.1, 2, 5, 40))


def ring(written: Callable[..., Any]) -> None:
    """Notebook 10, exercise 1: seconds of an all-reduce in a ring."""

    def truth(size: float, ranks: int, latency: float, bandwidth: float) -> float:
        return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)

    cases = [{"size": 2.6e6, "ranks": ranks, "latency": 5e-5, "bandwidth": 1.25e8} for ranks in (2, 3, 64)]
    because = "the bytes of a link hardly grow with the ranks, the turns do: in a large ring it is the latency that costs."
    _judge(written, truth, cases, because, "One turn takes latency + (size / ranks) / bandwidth.")


def resumed(guess: int | None, step: int) -> None:
    """Notebook 10: the step from which a run goes on that was killed in step 70, with a checkpoint every 25 steps."""
    _say(guess, guess == step, f"the last checkpoint is of step {step}.", f"it went on from step {step}: what was the last that was saved?")


def interval(written: Callable[..., Any]) -> None:
    """Notebook 10, exercise 2: seconds between checkpoints that cost least (Young 1974)."""
    cases = [{"write": 60.0, "between": 86400.0}, {"write": 5.0, "between": 3600.0}, {"write": 60.0, "between": 4 * 86400.0}]
    because = "with a quarter of the failures you save half as often."
    _judge(written, lambda write, between: math.sqrt(2 * write * between), cases, because, "Where is write / t + t / 2 / between least?")


def gbits(written: Callable[..., Any]) -> None:
    """Notebook 10, exercise 3: Gbit/s that hide a ring of fp32 gradients behind the backward."""

    def truth(parameters: float, backward: float, machines: int) -> float:
        return 32e-9 * parameters * 2 * (machines - 1) / machines / backward

    cases = [{"parameters": 650e6, "backward": 0.4, "machines": machines} for machines in (2, 64, 128)]
    because = "52 Gbit/s for two machines, 102 for 64, and hardly more for 128."
    _judge(written, truth, cases, because, "Bytes per link, times 8, over the seconds of the backward, over 1e9.")


def states(written: Callable[..., Any]) -> None:
    """Notebook 04, exercise 1: bytes of parameters, gradients and optimizer states in fp32."""
    cases = [{"parameters": 1000, "kept": 0}, {"parameters": 163_037_184, "kept": 2}, {"parameters": 7_000_000_000, "kept": 1}]
    because = (
        f"4 bytes for the parameter, 4 for its gradient, 4 for each kept number: {units.bytes_(16 * 163_037_184)} for this model and Adam."
    )
    hint = "A parameter, its gradient, and each number that the optimizer keeps take 4 bytes."
    _judge(written, lambda parameters, kept: 4 * (2 + kept) * parameters, cases, because, hint, 1e-6)


MIB = 2**20
GROWTH: Mapping[str, Callable[[int], int]] = {
    "16 + 5·batch": lambda batch: MIB * (16 + 5 * batch),
    "16 + 5·batch, or 9·batch where that is more,": lambda batch: MIB * max(16 + 5 * batch, 9 * batch),
    "16 + batch²": lambda batch: MIB * (16 + batch**2),
}
"""MiB over the batch; a straight line through the first two points is right for the first one only."""
ROOM, QUESTIONS = 1000 * MIB, 24


def largest_batch(written: Callable[[Callable[[int], int], int], Any]) -> None:
    """Notebook 04, exercise 2: the largest batch that fits; each question about a batch costs."""
    for words, needs in GROWTH.items():
        asked: list[int] = []

        def counted(batch: int, needs: Callable[[int], int] = needs, asked: list[int] = asked) -> int:
            asked.append(batch)
            if len(asked) > 10_000:
                raise RuntimeError("it never stops asking")
            return needs(batch)

        right = max(batch for batch in range(1, 1000) if needs(batch) <= ROOM)
        try:
            answer = written(counted, ROOM)
        except Exception as error:
            print(f"Not yet: where {words} MiB are needed, and 1,000 MiB are there, yours raises {type(error).__name__}: {error}")
            return
        if answer is None:
            print("Your turn: write the function and run the cell again.")
            return
        if answer != right or len(asked) > QUESTIONS:
            often = f"yours asks {len(asked)} times, and {QUESTIONS} are enough"
            wrong = f"yours gives {_shown(answer)}, and right is {right}" if answer != right else often
            print(f"Not yet: where {words} MiB are needed, and 1,000 MiB are there, {wrong}.")
            return
    print("Right: it asks seldom, and it trusts no straight line.")


def _sharded(parameters: int, ranks: int, stage: int) -> float:
    return sum(size * parameters / (ranks if stage >= first else 1) for size, first in ((4, 3), (4, 2), (8, 1)))


def per_rank(written: Callable[..., Any]) -> None:
    """Notebook 04, exercise 3: bytes of parameters, gradients and Adam's states on each rank, by ZeRO stage."""
    cases = [{"parameters": 1000, "ranks": 4, "stage": stage} for stage in range(4)] + [{"parameters": 7 * 10**9, "ranks": 64, "stage": 3}]
    because = f"seven billion parameters are {units.bytes_(7e9 * 16 / 64)} on each of 64 ranks, and {units.bytes_(7e9 * 16)} on one."
    hint = "Stage 1 divides the 8 bytes of Adam's states by the ranks, stage 2 the gradients too, stage 3 the parameters too."
    _judge(written, _sharded, cases, because, hint, 1e-6)


FIVES = ((1.69, 406.4, 410.7, 0.34, 0.28), (0.5, 300.0, 30.0, 0.7, 0.25), (1.0, 50.0, 50.0, 0.3, 0.3))
"""Laws: E, A, B, alpha, beta. The first is of Hoffmann and others (2022)."""


def _best(five: Sequence[float], flops: float) -> float:
    """The size with the lowest loss for 6·N·D FLOPs, in closed form."""
    _, a, b, alpha, beta = five
    return float((alpha * a / (beta * b)) ** (1 / (alpha + beta)) * (flops / 6) ** (beta / (alpha + beta)))


def best_size(written: Callable[..., Any]) -> None:
    """Notebook 07, exercise 1: the size with the lowest loss for a compute budget, to 2 %."""
    cases = [{"five": five, "flops": flops} for five in FIVES for flops in (1e12, 1e18)]
    hint = "For each size the tokens are flops / (6 · size): which size gives the lowest loss?"
    _judge(written, _best, cases, "a larger or a smaller model ends higher for the same FLOPs.", hint, 0.02)


def _overpaid(five: Sequence[float], size: float, tokens: float) -> float:
    _, a, b, alpha, beta = five
    low, high = 1.0, 6 * size * tokens
    while high > 1.0001 * low:
        flops = math.sqrt(low * high)
        best = _best(five, flops)
        good = a / best**alpha + b * (6 * best / flops) ** beta < a / size**alpha + b / tokens**beta
        low, high = (low, flops) if good else (flops, high)
    return 6 * size * tokens / high


def overpaid(written: Callable[..., Any]) -> None:
    """Notebook 07, exercise 2: a run's FLOPs over the fewest with which its loss is reached, to 3 %."""
    cases = [{"five": five, "size": size, "tokens": tokens} for five in FIVES for size, tokens in ((1e6, 1e9), (1e8, 1e8))]
    hint = "Search for the smallest compute whose best size ends as low as this run."
    _judge(written, _overpaid, cases, "that is the price of the wrong size.", hint, 0.03)


def _self_times(calls: Sequence[tuple[float, float]]) -> list[float]:
    times = [end - start for start, end in calls]
    for start, end in calls:
        around = [place for place, (first, last) in enumerate(calls) if first <= start and end <= last and (first, last) != (start, end)]
        if around:  # the innermost of them
            times[min(around, key=lambda place: calls[place][1] - calls[place][0])] -= end - start
    return times


def self_times(written: Callable[..., Any]) -> None:
    """Notebook 08, exercise 1: what calls take by themselves, without those inside them."""
    cases = [{"calls": [(0, 10)]}, {"calls": [(0, 10), (1, 4), (5, 9), (6, 8)]}, {"calls": [(0, 4), (4, 9), (4, 7)]}]
    hint = "Subtract the calls directly inside; what is inside of those is in their own length."
    _judge(written, _self_times, cases, "each moment counts once, so they add up to the time in which any call runs.", hint)


def _device_end(kernels: Sequence[tuple[float, float]]) -> float:
    end = 0.0
    for launched, length in kernels:
        end = max(end, launched) + length
    return end


def device_end(written: Callable[..., Any]) -> None:
    """Notebook 08, exercise 2: when a device is done that runs kernels one after another, each after its launch."""
    late, long = [(0, 5), (10, 5), (20, 5)], [(0, 50), (10, 50), (20, 50)]
    cases = [{"kernels": [(0, 5)]}, {"kernels": late}, {"kernels": long}, {"kernels": [(0, 5), (10, 50), (20, 5), (90, 5)]}]
    hint = "A kernel begins once it is launched and the one before it has ended, whichever comes later."
    _judge(written, _device_end, cases, "short kernels wait for their launches, and long ones for each other.", hint)


def _exposed(communication: Sequence[tuple[float, float]], computing: Sequence[tuple[float, float]]) -> float:
    hidden = sum(max(0.0, min(a, b) - max(c, d)) for c, a in communication for d, b in computing)
    return sum(end - start for start, end in communication) - hidden


def exposed(written: Callable[..., Any]) -> None:
    """Notebook 08, exercise 3: the time of communication that no computing hides; the spans of a list do not overlap each other."""
    cases = [
        {"communication": [(0, 10)], "computing": []},
        {"communication": [(0, 10)], "computing": [(2, 5)]},
        {"communication": [(0, 10), (20, 30)], "computing": [(5, 22), (28, 40)]},
        {"communication": [(0, 10)], "computing": [(1, 2), (3, 4), (9, 30)]},
    ]
    hint = "Two spans overlap from the later start to the earlier end, if that is positive."
    _judge(written, _exposed, cases, "all communication, less what computing hides.", hint)


def epoch_seconds(written: Callable[..., Any]) -> None:
    """Notebook 13, exercise 1: seconds of an epoch from a store that answers late."""

    def truth(requests: int, size: float, latency: float, together: int, bandwidth: float) -> float:
        return math.ceil(requests / together) * latency + size / bandwidth

    cases = [
        {"requests": 1277, "size": 2e6, "latency": 0.02, "together": 16, "bandwidth": 1e8},
        {"requests": 17, "size": 1e9, "latency": 0.1, "together": 16, "bandwidth": 1e8},
        {"requests": 1, "size": 1e9, "latency": 0.1, "together": 16, "bandwidth": 1e8},
    ]
    hint = "Requests that are made together wait once; the bytes pass one after the other."
    _judge(written, truth, cases, "all waits, and all bytes.", hint, 1e-3)


epoch_seconds.wrong = (  # type: ignore[attr-defined]
    lambda requests, size, latency, together, bandwidth: requests * latency + size / bandwidth,
    lambda requests, size, latency, together, bandwidth: max(requests / together * latency, size / bandwidth),
)


def chunks_fetched(written: Callable[..., Any]) -> None:
    """Notebook 13, exercise 2: chunks that a batch of random samples touches, on average."""
    cases = [{"chunks": 16, "batch": 32}, {"chunks": 10_000, "batch": 32}, {"chunks": 1, "batch": 8}]
    hint = "A chunk is missed with probability (1 - 1 / chunks) by one sample; by all of them?"
    because = "each chunk is fetched unless all samples of the batch miss it."
    _judge(written, lambda chunks, batch: chunks * (1 - (1 - 1 / chunks) ** batch), cases, because, hint, 1e-3)


chunks_fetched.wrong = (lambda chunks, batch: min(chunks, batch), lambda chunks, batch: batch)  # type: ignore[attr-defined]


def noticed(guess: int | None, found: int) -> None:
    """Notebook 13: how many flipped bits the decoder notices; within 30 is right."""
    hint = f"{found}: most damage in compressed pictures decodes to something else, without an error."
    _say(guess, guess is not None and abs(guess - found) <= 30, f"{found}.", hint)


def slowest_reader(written: Callable[..., Any]) -> None:
    """Notebook 13, exercise 3: the largest share of shards over the mean."""
    cases = [{"shards": 10, "readers": 8}, {"shards": 64, "readers": 8}, {"shards": 33, "readers": 8}, {"shards": 4, "readers": 8}]
    hint = "How many whole shards does the reader have that has most?"
    because = "the slowest has a whole shard more than a fair share, at worst."
    _judge(written, lambda shards, readers: math.ceil(shards / readers) * readers / shards, cases, because, hint)


slowest_reader.wrong = (lambda shards, readers: shards / readers, lambda shards, readers: 1.0)  # type: ignore[attr-defined]


def leaking_share(written: Callable[..., Any]) -> None:
    """Notebook 14, exercise 1: the share of held-out samples that have an equal one in training."""

    def truth(groups: Sequence[int], samples: int, validation: float) -> float:
        return sum(size * (1 - validation ** (size - 1)) for size in groups) / samples

    cases = [
        {"groups": [2, 2, 3], "samples": 100, "validation": 0.2},
        {"groups": [2] * 10, "samples": 20, "validation": 0.5},
        {"groups": [], "samples": 10, "validation": 0.2},
    ]
    hint = "A picture in a group of n is safe only if the n - 1 others are held out, too."
    _judge(written, truth, cases, "a twin leaks unless all of its group are held out.", hint)


leaking_share.wrong = (  # type: ignore[attr-defined]
    lambda groups, samples, validation: sum(groups) / samples,
    lambda groups, samples, validation: len(groups) / samples * (1 - validation),
)


def honest(written: Callable[..., Any]) -> None:
    """Notebook 14, exercise 2: the accuracy on samples that a model has never seen."""
    cases = [
        {"reported": 0.91, "leaked": 0.3, "by_heart": 1.0},
        {"reported": 0.5, "leaked": 0.5, "by_heart": 0.9},
        {"reported": 0.8, "leaked": 0.0, "by_heart": 1.0},
    ]
    hint = "reported = leaked × by_heart + (1 - leaked) × what you look for."
    because = "what was answered by heart is taken out, and the rest is shared by fewer samples."
    _judge(written, lambda reported, leaked, by_heart: (reported - leaked * by_heart) / (1 - leaked), cases, because, hint)


honest.wrong = (  # type: ignore[attr-defined]
    lambda reported, leaked, by_heart: reported - leaked,
    lambda reported, leaked, by_heart: reported * (1 - leaked),
)


def percent(guess: float | None, measured: float) -> None:
    """Notebook 14: the accuracy without the leak, in percent; within 3 points is right."""
    right = guess is not None and abs(guess - 100 * measured) <= 3
    _say(
        guess,
        right,
        f"it is {units.percent(measured)}.",
        f"{units.percent(measured)}: the answers that were known by heart hid a part of the errors.",
    )


def most_suspect(written: Callable[..., Any]) -> None:
    """Notebook 14, exercise 3: the samples whose own label is least probable."""

    def truth(probabilities: Sequence[Sequence[float]], labels: Sequence[int], count: int) -> list[int]:
        own = [row[label] for row, label in zip(probabilities, labels, strict=True)]
        return sorted(range(len(own)), key=own.__getitem__)[:count]

    cases = [
        {"probabilities": [[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]], "labels": [0, 0, 0], "count": 2},
        {"probabilities": [[0.1, 0.2, 0.7], [0.05, 0.9, 0.05], [0.3, 0.3, 0.4]], "labels": [1, 1, 2], "count": 3},
    ]
    hint = "Look at the probability of the label that a sample was given, not at the largest."
    _judge(written, truth, cases, "the least probable own labels come first.", hint)


most_suspect.wrong = (  # type: ignore[attr-defined]
    lambda probabilities, labels, count: sorted(range(len(labels)), key=lambda index: max(probabilities[index]))[:count][::-1],
    lambda probabilities, labels, count: list(range(count)),
)


def times_as_long(guess: float | None, ratio: float) -> None:
    """Notebook 15: how many times as long a step takes that computes its forward twice; the nearest of 1.05, 1.3, 2 and 3 is right."""
    nearest = min((1.05, 1.3, 2, 3), key=lambda choice: abs(math.log(choice / ratio)))
    said = f"{units.times(ratio)} as long"
    hint = f"{said}: of the three parts of a step (a forward, and a backward of two) one comes again."
    _say(guess, guess == nearest, f"{said}.", hint, (1.05, 1.3, 2, 3))


def loss_scale(written: Callable[..., Any]) -> None:
    """Notebook 15, exercise 1: the loss scale after a step, as torch's GradScaler has it."""

    def truth(scale: float, overflowed: bool, good: int, every: int) -> float:
        return scale / 2 if overflowed else scale * 2 if good + 1 == every else scale

    cases = [
        {"scale": 65536.0, "overflowed": True, "good": 1999, "every": 2000},
        {"scale": 1024.0, "overflowed": False, "good": 1998, "every": 2000},
        {"scale": 1024.0, "overflowed": False, "good": 1999, "every": 2000},
    ]
    because = "it climbs until gradients overflow, and that step is thrown away: a search for the largest scale, all the time."
    _judge(written, truth, cases, because, "Halve it when gradients overflowed; double it when this good step completes `every` of them.")


def shares_of(written: Callable[..., Any]) -> None:
    """Notebook 15, exercise 2: what the mean loss of each micro-batch is multiplied with, so that their sum is the mean of all samples."""
    cases = [{"sizes": [8, 8, 8, 8]}, {"sizes": [8, 8, 8, 2]}, {"sizes": [1, 3]}]
    because = "each sample counts the same; with a quarter each, those of a short last micro-batch would count four times as much."
    hint = "Each of all the samples should count the same."
    _judge(written, lambda sizes: [size / sum(sizes) for size in sizes], cases, because, hint)


shares_of.wrong = (lambda sizes: [1 / len(sizes)] * len(sizes), lambda sizes: list(sizes))  # type: ignore[attr-defined]


def kept(written: Callable[..., Any]) -> None:
    """Notebook 15, exercise 3: bytes at the peak of the backward with a checkpoint in front of each `every` layers."""

    def truth(layers: int, inside: float, between: float, every: int) -> float:
        return layers / every * between + every * inside

    cases = [{"layers": 16, "inside": 10.0, "between": 1.0, "every": every} for every in (1, 4, 16)]
    hint = "One input for each segment is kept all the time, and the inside of the one segment that is computed again."
    _judge(written, truth, cases, "few inputs, or a small inside: the least lies between.", hint)


def bucket_sizes(written: Callable[..., Any]) -> None:
    """Notebook 16, exercise 1: how DDP packs gradients, from the last parameter to the first, into buckets of a size."""

    def truth(sizes: Sequence[int], cap: int) -> list[int]:
        buckets, open_ = [], 0
        for size in reversed(sizes):
            open_ += size
            if open_ >= cap:
                buckets.append(open_)
                open_ = 0
        return [*buckets, open_] if open_ else buckets

    cases = [{"sizes": sizes, "cap": 8} for sizes in ([4, 4, 4, 4], [5, 1, 2, 9], [3], [3, 3, 3, 3])]
    because = "the last layers' gradients are complete first, so they are sent while the first layers still compute."
    _judge(written, truth, cases, because, "Go from the last to the first, and close a bucket as soon as it holds `cap` or more.")


def _never_above(sizes: Sequence[int], cap: int) -> list[int]:
    """Buckets that are closed before they would hold more than `cap`."""
    buckets = [0]
    for size in reversed(sizes):
        if buckets[-1] and buckets[-1] + size > cap:
            buckets.append(0)
        buckets[-1] += size
    return buckets


bucket_sizes.wrong = (_never_above,)  # type: ignore[attr-defined]


def sent(written: Callable[..., Any]) -> None:
    """Notebook 16, exercise 2: bytes that a rank sends in a step, with fp32, in rings."""

    def truth(parameters: int, ranks: int, mode: str) -> float:
        return (2 if mode == "ddp" else 3) * (ranks - 1) / ranks * 4 * parameters

    cases = [{"parameters": 10**6, "ranks": ranks, "mode": mode} for ranks in (2, 8) for mode in ("ddp", "fsdp")]
    because = "FSDP sends half as much again, and holds a part of everything."
    hint = "A pass around the ring is (ranks − 1) / ranks of the bytes. An all-reduce makes two; FSDP gathers twice and scatters once."
    _judge(written, truth, cases, because, hint)


def bubble(written: Callable[..., Any]) -> None:
    """Notebook 16, exercise 3: the share of a step in which a rank of a pipeline waits (Narayanan et al. 2021)."""
    cases = [{"stages": 2, "micro_batches": 4}, {"stages": 8, "micro_batches": 8}, {"stages": 8, "micro_batches": 64}]
    because = "eight stages wait half of the time with 8 micro-batches, and a tenth of it with 64."
    hint = "A stage works for `micro_batches` turns. The last begins after `stages − 1`, and all wait that long, at one end or the other."
    _judge(written, lambda stages, micro_batches: (stages - 1) / (micro_batches + stages - 1), cases, because, hint)


def holds_least(guess: str | None, held: Mapping[str, float]) -> None:
    """Notebook 16: which way of sharing lets a rank hold the least of parameters, gradients and optimizer states."""
    least = [name for name, size in held.items() if size <= 1.05 * min(held.values())]  # FSDP and PP both hold half
    words = " and ".join(least)
    _say(
        guess, guess in least, f"{words} hold about half of everything.", f"it is {words}: look at the bars of what each rank holds.", held
    )


def loses(guess: str | None, part: str) -> None:
    """Notebook 17: what a checkpoint lacks of a task that draws its noise from a generator of its own."""
    hint = f"the proof names the {part}: weights and order of samples were restored."
    _say(guess, guess == part, f"the proof names the {part}.", hint, ("weights", "samples", "batch", "none"))


def first_difference(written: Callable[..., Any]) -> None:
    """Notebook 17, exercise 1: the first step and part in which two trainings differ; "none" where they do not."""

    def truth(one: Sequence[Mapping[str, str]], other: Sequence[Mapping[str, str]], parts: Sequence[str]) -> Any:
        for step, (a, b) in enumerate(zip(one, other, strict=True), 1):
            for part in parts:
                if a[part] != b[part]:
                    return [step, part]
        return "none"

    parts = ["weights", "samples", "loss"]
    plain = [{"weights": f"w{step}", "samples": f"s{step}", "loss": f"l{step}"} for step in range(3)]
    late = [plain[0], plain[1], {**plain[2], "loss": "x"}]
    early = [plain[0], {**plain[1], "loss": "x", "samples": "x"}, dict.fromkeys(parts, "x")]
    cases = [{"one": plain, "other": other, "parts": parts} for other in (early, late, plain)]
    hint = "Go step by step, and in a step through the parts in their order: what comes first is the cause of the rest."
    _judge(written, truth, cases, "the first difference is the cause, and all later ones follow from it.", hint)


def awaited(written: Callable[..., Any]) -> None:
    """Notebook 17, exercise 2: which ranks hold up the others, from the number of collectives that each has called."""

    def truth(calls: Mapping[int, int]) -> list[int]:
        return sorted(rank for rank, count in calls.items() if count < max(calls.values()))

    cases = [{"calls": {0: 412, 1: 411, 2: 412}}, {"calls": {0: 7, 1: 7}}, {"calls": {0: 3, 1: 9, 2: 5}}]
    hint = "Whoever has called fewer than another is waited for."
    _judge(written, truth, cases, "the counts alone say who is waited for; the stacks say what they do instead.", hint)


def validated(written: Callable[..., Any]) -> None:
    """Notebook 17, exercise 3: the mean loss of all samples, from the sum and the count of each rank."""
    cases = [{"sums": [20.0, 20.0], "counts": [10, 10]}, {"sums": [30.0, 2.0], "counts": [10, 1]}, {"sums": [3.0, 0.0], "counts": [2, 0]}]
    hint = "Add up before you divide; a rank without samples has nothing to divide by."
    _judge(written, lambda sums, counts: sum(sums) / sum(counts), cases, "each sample counts once, on whatever rank it was.", hint)


validated.wrong = (  # type: ignore[attr-defined]
    lambda sums, counts: sum(a / max(n, 1) for a, n in zip(sums, counts, strict=True)) / len(sums) + 1e-3,
)


def met_after_each(written: Callable[..., Any]) -> None:
    """Notebook 11, exercise 1: mean seconds of a step in which all ranks wait for the slowest."""

    def truth(ranks: Sequence[Sequence[float]]) -> float:
        steps = list(zip(*ranks, strict=True))
        return sum(map(max, steps)) / len(steps)

    cases = [{"ranks": [[10, 30, 10, 30], [30, 10, 30, 10]]}, {"ranks": [[10, 10, 10], [12, 12, 12], [8, 15, 8]]}]
    because = "in every step the slowest one counts, whoever it is."
    _judge(written, truth, cases, because, "Take the slowest rank of each step first, and the mean afterwards.")


met_after_each.wrong = (  # type: ignore[attr-defined]
    lambda ranks: max(sum(rank) / len(rank) for rank in ranks),
    lambda ranks: sum(map(sum, ranks)) / sum(map(len, ranks)),
)


def speedup_without(written: Callable[..., Any]) -> None:
    """Notebook 11, exercise 2: speedup if some parts of the step were gone."""

    def truth(step: float, parts: Mapping[str, float], gone: Sequence[str]) -> float:
        return step / (step - sum(parts[name] for name in gone))

    parts = {"slow rank": 6.0, "loaders": 2.0, "large gradients": 4.0}
    cases = [{"step": 32.0, "parts": parts, "gone": gone} for gone in (["slow rank"], ["slow rank", "loaders"], [])]
    _judge(written, truth, cases, "the parts add up, so they can be taken away together.", "What is left of the step? Old over new.")


def price(written: Callable[..., Any]) -> None:
    """Notebook 11, exercise 3: what a sample costs on N ranks, beside one."""
    cases = [{"ranks": 2, "speedup": 1.5}, {"ranks": 8, "speedup": 8.0}, {"ranks": 64, "speedup": 20.0}]
    hint = "N ranks cost N times as much per hour. How many samples come out of an hour?"
    _judge(written, lambda ranks, speedup: ranks / speedup, cases, "N ranks are paid, and the speedup comes out.", hint)


def beside_neighbours(written: Callable[..., Any]) -> None:
    """Notebook 12, exercise 1: the ratio of a changed training to the two beside it, on a machine that drifts."""
    cases = [
        {"before": 10.0, "changed": 13.2, "after": 12.0},
        {"before": 8.0, "changed": 8.0, "after": 8.0},
        {"before": 8.0, "changed": 18.0, "after": 16.0},
    ]
    because = "a drift that is even is in no ratio."
    _judge(
        written, lambda before, changed, after: changed / ((before + after) / 2), cases, because, "What would A have taken at that moment?"
    )


beside_neighbours.wrong = (  # type: ignore[attr-defined]
    lambda before, changed, after: changed / before,
    lambda before, changed, after: (changed / before + changed / after) / 2,
)


def commit(guess: int | None, place: int) -> None:
    """Notebook 12: is the guess the commit that made it slower?"""
    _say(guess, guess == place, f"{place}, which claims to do something harmless.", f"it was {place}.")


def tries(written: Callable[..., Any]) -> None:
    """Notebook 12, exercise 3: how many commits a bisection trains at most, beside the good one and the last."""
    cases = [{"commits": commits} for commits in (1, 2, 5, 64, 1000)]
    because = "a thousand commits take ten."
    _judge(written, lambda commits: math.ceil(math.log2(commits)), cases, because, "Each training leaves half of the commits.")


def pairs(written: Callable[..., Any]) -> None:
    """Notebook 12, exercise 2: pairs of trainings until a change is larger than twice its standard error."""
    cases = [{"change": 0.02, "spread": 0.03}, {"change": 0.10, "spread": 0.03}, {"change": 0.05, "spread": 0.20}]
    hint = "The mean of n has a standard error of spread / √n. When is the change more than two of them?"
    _judge(
        written,
        lambda change, spread: math.ceil((2 * spread / change) ** 2),
        cases,
        "half the change takes four times as many.",
        hint,
        0.02,
    )


def usual(written: Callable[..., Any]) -> None:
    """Notebook 18, exercise 1: the median of a block of steps."""

    def truth(seconds: Sequence[float]) -> float:
        ordered = sorted(seconds)
        return (ordered[len(ordered) // 2] + ordered[~(len(ordered) // 2)]) / 2

    cases = [{"seconds": [0.1, 0.11, 0.1, 1.0, 0.12, 0.1, 0.11, 0.1]}, {"seconds": [3.0, 1.0, 2.0]}, {"seconds": [1.0, 2.0]}]
    _judge(written, truth, cases, "one long step hardly moves the median.", "What is in the middle once they are sorted?")


usual.wrong = (lambda seconds: sum(seconds) / len(seconds), max)  # type: ignore[attr-defined]


def probability(written: Callable[..., Any]) -> None:
    """Notebook 18, exercise 2: the probability of a change after some blocks."""

    def truth(prior: float, ratio: float, blocks: int) -> float:
        odds = prior / (1 - prior) * ratio**blocks
        return odds / (1 + odds)

    cases = [{"prior": 1 / 2000, "ratio": 20.0, "blocks": blocks} for blocks in (1, 4)] + [{"prior": 0.5, "ratio": 1.0, "blocks": 9}]
    _judge(written, truth, cases, "each block multiplies the odds.", "Begin with the odds, prior / (1 - prior).")


def hours_lost(written: Callable[..., Any]) -> None:
    """Notebook 18, exercise 3: hours lost by steps that are longer."""
    cases = [
        {"since": 41_200, "until": 300_000, "step": 1.0, "change": 0.31},
        {"since": 0, "until": 3600, "step": 2.0, "change": 0.5},
    ]
    because, hint = "early alarms are cheap.", "Each slow step is too long by step × change seconds."
    _judge(written, lambda since, until, step, change: (until - since) * step * change / 3600, cases, because, hint)

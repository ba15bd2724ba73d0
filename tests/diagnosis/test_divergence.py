"""The first divergence: planted ones are placed at their operator or module, and healthy pairs are never called a bug."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import workbench as wb
from tests.conftest import HandMade
from workbench.core import run_directory
from workbench.diagnosis.analysis.divergence import VERDICTS, Divergence, Point
from workbench.diagnosis.measure import divergence as measure
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.run import Run
from workbench.runs.spec import ScriptSpec
from workbench.runs.task import resolve

X = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1))


class Scale(torch.autograd.Function):
    """Doubles; the gradient may be wrong."""

    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.factor, None


class Doubling(nn.Module):
    """Doubles its input."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Scale.apply(x, self.factor)  # type: ignore[no-untyped-call]
        return made


class Attention(nn.Module):
    """One head, in one of several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.how, self.scale, self.fill = "math", 8**-0.5, -1e9

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.how == "torch":
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        scores = q @ k.transpose(1, 2) * self.scale
        if self.how == "masked":
            scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), self.fill)
        if self.how == "fp32":  # as many models compute it, whatever type they are given
            small: Tensor = scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ v
            return small.to(torch.float32).float().to(x.dtype)
        weighted: Tensor = scores.softmax(-1) @ v
        return weighted


class Net(nn.Module):
    """A block with everything that may differ."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.attention = nn.Linear(8, 8), nn.LayerNorm(8), Attention()
        self.act, self.twice, self.drop = nn.GELU(), Doubling(), nn.Dropout(0.0)
        self.batch_norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.attention(self.norm(x))
        x = self.drop(self.twice(self.act(x)))
        logits: Tensor = self.head(self.batch_norm(x.mean(1)))
        return logits


def net(change: Callable[[Net], object] = lambda net: None) -> Net:
    torch.manual_seed(0)
    made = Net()
    change(made)
    return made


def adam(**options: Any) -> Callable[[Any], Any]:
    return lambda weights: torch.optim.AdamW(weights, lr=0.01, **options)


def setting(path: str, value: Any) -> Callable[[Net], object]:
    """A change of an attribute in a module."""
    module, _, name = path.rpartition(".")
    return lambda net: setattr(net.get_submodule(module), name, value)


BUGS: dict[str, tuple[Callable[[Net], object], str, str, str]] = {
    "eps of a norm": (setting("norm.eps", 1e-3), "forward", "norm", "native_layer_norm"),
    "another GELU": (setting("act.approximate", "tanh"), "forward", "act", "gelu"),
    "scale of the attention": (setting("attention.scale", 0.3), "forward", "attention", "mul"),
    "a mask": (setting("attention.how", "masked"), "forward", "attention", "aten.ones"),
    "wrong gradient": (setting("twice.factor", 1.9), "backward", "twice", "mul"),
    "eps of batch norm": (setting("batch_norm.eps", 1e-2), "forward", "batch_norm", "native_batch_norm"),
    "momentum of batch norm": (setting("batch_norm.momentum", 0.3), "after", "batch_norm", "native_batch_norm"),
    "no bias": (lambda net: setattr(net.head, "forward", lambda x: F.linear(x, net.head.weight)), "forward", "head", "aten.addmm"),
    "a gradient that is cut": (
        lambda net: net.norm.register_forward_hook(lambda m, i, o: o.detach()),
        "backward",
        "norm",
        "native_layer_norm_backward",
    ),
}
"""A change, and where it shows: phase, module, operator. Where the two have other operators, it is the one at which their lists part."""


class Functional(nn.Module):
    """Code without a module between two layers; both are sound, whatever they are given."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.how = nn.Linear(8, 16), nn.Linear(16, 8), how

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        if self.how == "clamp":
            hidden = hidden.clamp(max=0.5)
        if self.how == "softmax":
            return self.down(hidden.softmax(-2).nan_to_num(0)) + x  # type: ignore[no-any-return]
        return self.down(hidden.softmax(-1)) + x  # type: ignore[no-any-return]


@pytest.mark.parametrize(("how", "operator"), [("clamp", "aten.clamp"), ("softmax", "aten._softmax")])
def test_a_bug_between_two_modules_is_blamed_on_neither(how: str, operator: str) -> None:
    found = wb.diverge(Functional(), Functional(how), batch=X)
    assert found.first is not None
    assert (found.verdict, found.by) == ("bug", "modules")
    assert (found.first.phase, found.first.module, found.first.operator) == ("forward", "between up and down", operator)


@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_the_values_of_a_mask_hide_no_difference(fill: float) -> None:
    """The model is frozen, so that no gradient shows the difference either."""

    def masked(change: Callable[[Net], object]) -> Net:
        made = net(setting("attention.how", "masked")).requires_grad_(False)
        made.attention.fill = fill
        change(made)
        return made

    found = wb.diverge(masked(lambda net: None), masked(BUGS["eps of a norm"][0]), batch=X)
    assert found.first is not None
    assert (found.verdict, found.first.phase, found.first.module) == ("bug", "forward", "norm"), found
    assert found.first.difference > 1e-4


def test_a_module_in_evaluation_mode_is_named() -> None:
    one, other = net(setting("drop.p", 0.5)), net(setting("drop.p", 0.5))
    other.drop.eval()
    found = wb.diverge(one, other, batch=X)
    assert (found.verdict, found.first and found.first.module) == ("bug", "drop"), found
    assert found.notes == ("drop is in training mode in the first of the two, and in evaluation mode in the second",)
    one.eval()
    one.drop.train()
    other.train()
    (note,) = wb.diverge(one, other, batch=X).notes
    assert note == "the model is in evaluation mode in the first of the two, and in training mode in the second"


def test_no_operator_is_named_where_one_of_the_two_did_not_record_any() -> None:
    def run(which: int, double: bool, steps: int, enough: Callable[[], bool]) -> Any:
        made = measure.of_pair(measure.Pair(net(BUGS["another GELU"][0]) if which else net(), X), 0, steps, double, enough)
        return [entry for entry in made if entry.kind != "operator" or not which]

    first = measure.compare(("one process", "ranks"), run, lambda now, known: None).first
    assert first is not None
    assert (first.module, first.operator) == ("act", "")


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_placed(name: str) -> None:
    change, phase, module, operator = BUGS[name]
    first = net()
    before = {name: value.clone() for name, value in first.state_dict().items()}
    found = wb.diverge(first, net(change), batch=X)
    assert found.verdict == "bug", found
    assert found.first is not None
    assert (found.first.phase, found.first.module.split(".")[0]) == (phase, module), found
    assert found.first.operator == f"aten.{operator.removeprefix('aten.')}"
    assert all(torch.equal(value, before[name]) and value.dtype == before[name].dtype for name, value in first.state_dict().items())
    assert Divergence.from_json(json.loads(json.dumps(found.to_json()))) == found


OPTIMIZERS: dict[str, tuple[tuple[Any, Any], str, str]] = {
    "eps": ((adam(), adam(eps=1e-3)), "aten.add_", "eps: 1e-08 and 0.001"),
    "weight decay": ((adam(), adam(weight_decay=0.0)), "aten.mul_", "weight_decay: 0.01 and 0.0"),
    "betas": ((adam(), adam(betas=(0.5, 0.999))), "aten.lerp_", "betas: [0.9, 0.999] and [0.5, 0.999]"),
    "several tensors at once": ((adam(foreach=True), adam(foreach=True, eps=1e-3)), "aten._foreach_add_", "eps: 1e-08 and 0.001"),
    "fused": ((adam(fused=True), adam(fused=True, eps=1e-3)), "aten._fused_adamw_", "eps: 1e-08 and 0.001"),
}
"""Two optimizers, the operator of the update at which they differ first, and what is said of their options."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_operator_and_the_option_of_an_optimizer_that_differs_are_named(name: str) -> None:
    optimizers, operator, said = OPTIMIZERS[name]
    first, second = net(), net()
    weights = [list(map(id, model.parameters())) for model in (first, second)]

    def built(parameters: Any) -> Any:
        given = list(parameters)
        which = weights.index(list(map(id, given)))
        optimizer = optimizers[which](given)
        for group in optimizer.param_groups:  # as one made of named_parameters() has them
            group["param_names"] = [f"{which}.{place}" for place in range(len(group["params"]))]
        return optimizer

    found = wb.diverge(first, second, batch=X, optimizer=built)
    assert "param_names" not in str(found)
    assert (found.verdict, found.by) == ("bug", "operators"), found
    assert found.first is not None
    assert (found.first.step, found.first.phase, found.first.operator) == (1, "optimizer", operator), found
    assert found.first.module == "the change of embed.weight"
    assert found.notes == (f"options of the optimizer that differ for embed.weight: {said}",)


def test_a_rule_of_the_update_that_differs_is_placed_where_its_options_agree() -> None:
    class Wrong(torch.optim.SGD):
        """Forgets the momentum of biases."""

        def step(self, closure: Any = None) -> Any:
            done = super().step(closure)
            for weight in (weight for group in self.param_groups for weight in group["params"] if weight.ndim == 1):
                self.state[weight]["momentum_buffer"].mul_(0.5)
            return done

    first, second = net(), net()
    own = {id(weight) for weight in second.parameters()}

    def built(parameters: Any) -> Any:
        given = list(parameters)
        return (Wrong if id(given[0]) in own else torch.optim.SGD)(given, lr=0.1, momentum=0.9)

    found = wb.diverge(first, second, batch=X, optimizer=built)
    assert found.first is not None
    assert (found.verdict, found.first.step, found.first.module) == ("bug", 1, "the change of embed.bias"), found
    assert (found.first.operator, found.notes) == ("aten.mul_", ())


def test_an_optimizer_that_differs_is_placed() -> None:
    spec = wb.RunSpec(task="fashion-mlp", device="cpu", micro_batch=8, optimizer="adamw(lr=0.01)")
    found = wb.diverge(spec, spec.replace(optimizer="adamw(lr=0.01, eps=1e-3)"), budget_s=600)
    assert (found.verdict, found.first and found.first.phase, found.first and found.first.operator) == ("bug", "optimizer", "aten.add_"), (
        found
    )
    assert "optimizer='adamw(lr=0.01, eps=1e-3)'" in str(found)
    assert "eps: 1e-08 and 0.001" in str(found)
    cut = wb.diverge(spec, spec.replace(clip_grad_norm=0.1), budget_s=600)
    assert (cut.verdict, cut.first and cut.first.phase) == ("design", "optimizer"), cut
    assert cut.notes[0] == "clip_grad_norm: the specs differ in it"
    assert cut.first is not None
    assert "norm" in cut.first.operator, cut
    smooth = wb.diverge(spec, spec.replace(label_smoothing=0.1), budget_s=600)
    assert (smooth.verdict, smooth.notes[0]) == ("design", "label_smoothing: the specs differ in it"), smooth
    other = wb.diverge(spec, spec.replace(seed=3))
    assert other.verdict == "start"
    assert VERDICTS["start"] in str(other)


SPEC = wb.RunSpec(task="fashion-mlp", device="cpu", micro_batch=8)
TWO = SPEC.replace(nproc_per_node=2, micro_batch=4)


@pytest.mark.parametrize(
    ("a", "b", "step", "phase", "module", "notes"),
    [
        (TWO, TWO.replace(local_sgd="periodic"), 1, "backward", "0.weight", ["local_sgd"]),
        (TWO, TWO.replace(gradient_compression="powersgd"), 1, "backward", "0.weight", ["gradient_compression"]),
        (SPEC, TWO.replace(gradient_compression="fp16"), 2, "forward", "0", ["gradient_compression"]),
        (
            TWO.replace(local_sgd="periodic"),
            TWO.replace(local_sgd="periodic", nproc_per_node=4, micro_batch=2),
            1,
            "backward",
            "0.weight",
            ["local_sgd"],
        ),
        (TWO, TWO.replace(local_sgd="periodic"), 1, "forward", "0", []),  # before any gradient
        (SPEC, SPEC.replace(micro_batch=4, accumulation=2), 1, "forward", "3", ["batch norm"]),
        (SPEC, SPEC.replace(micro_batch=4, accumulation=2), 1, "forward", "the loss", ["batch norm"]),
        (SPEC, TWO, 1, "after", "3.running_mean", ["batch norm"]),
        (SPEC, TWO, 1, "forward", "2", []),  # before the norm
        (SPEC, SPEC.replace(checkpointing="full"), 1, "forward", "3", []),
        (SPEC, SPEC.replace(optimizer="adamw(eps=1e-3)"), 1, "optimizer", "0.weight", []),
    ],
)
def test_what_differs_by_design_is_no_bug(a: wb.RunSpec, b: wb.RunSpec, step: int, phase: str, module: str, notes: list[str]) -> None:
    first = Point(step=step, phase=phase, module=module, operator="", difference=0.5)
    found = Divergence(a="a", b="b", verdict="bug", first=first, exact=0.5, largest=0.5, compared=9, by="modules")
    judged = found.judged(a, b, ["3", "30"])
    assert (judged.verdict, [note.partition(":")[0] for note in judged.notes]) == ("design" if notes else "bug", notes)
    assert VERDICTS[judged.verdict] in str(judged)


@pytest.mark.parametrize("name", ["eps of a norm", "another GELU", "scale of the attention", "eps of batch norm", "a mask"])
def test_the_first_operator_is_that_of_the_first_hash_of_torch(name: str) -> None:
    debug = pytest.importorskip("torch.utils._debug_mode").DebugMode
    if not hasattr(debug, "check_hash_mismatches"):
        pytest.skip("this torch does not compare hashes")
    logs, change = [], BUGS[name][0]
    for model in (net(), net(change)):
        with torch.no_grad(), debug() as mode, debug.log_tensor_hashes():
            model(X)
        logs.append(mode.logs)
    if name == "a mask":
        with pytest.raises(ValueError, match="don't match"):
            debug.check_hash_mismatches(*logs)
        return
    first = wb.diverge(net(), net(change), batch=X).first
    assert first is not None
    assert debug.check_hash_mismatches(*logs)[0]["call"].replace("::", ".").startswith(first.operator)


def test_two_runs_are_compared_by_their_specs(by_hand: Callable[..., HandMade], tmp_path: Path) -> None:
    spec = wb.RunSpec(task="fashion-mlp", device="cpu", micro_batch=8)
    runs = [by_hand(spec=spec.replace(**knobs).to_json()).ended("finished").path for knobs in ({}, {"seed": 3}, {"precision": "amp_bf16"})]
    assert wb.diverge(Run.load(runs[0]), runs[0], budget_s=600).verdict == "identical"
    (runs[0] / run_directory.ENVIRONMENT).write_text(json.dumps({"code": {"digits.py": "1", "tests/conftest.py": "2"}}))
    code = "the code of {} has changed since it was trained (tests/conftest.py), and the present code was repeated"
    assert wb.diverge(runs[0], runs[0], budget_s=600).notes == (code.format(runs[0].name),)
    assert wb.diverge(runs[0], str(runs[1]), budget_s=600).verdict == "start"  # two seeds: other weights and other batches
    rounded = wb.diverge(spec, runs[2], budget_s=600)
    assert (rounded.verdict, rounded.b) == ("rounding", "precision='amp_bf16'")
    script = by_hand(spec=ScriptSpec(script="train.py").to_json()).ended("finished").path
    with pytest.raises(ValueError, match="it is the run of a script; a script by the models in it"):
        wb.diverge(script, script)
    with pytest.raises(ValueError, match="there is no such folder"):
        wb.diverge(tmp_path / "nothing", runs[0])
    theirs = by_hand(spec=spec.replace(task=f"{tmp_path}/runs/004/evil.py:build").to_json()).ended("finished").path
    (theirs / "evil.py").write_text("raise SystemExit('executed')")
    with pytest.raises(LaunchError, match="inside its own run directory"):
        wb.diverge(runs[0], theirs)


def compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="aot_eager")


def transposed(net: Net) -> None:
    """The same product in another order of memory."""
    net.embed.forward = lambda x: (net.embed.weight @ x.transpose(1, 2)).transpose(1, 2) + net.embed.bias  # type: ignore[method-assign]


def in_parts(net: Net) -> None:
    weight = net.head.weight
    net.head.forward = lambda x: F.linear(x[:, :3], weight[:, :3]) + F.linear(x[:, 3:], weight[:, 3:]) + net.head.bias  # type: ignore[method-assign]


HEALTHY: dict[str, Callable[[], tuple[Any, Any, dict[str, Any]]]] = {
    "the same": lambda: (net(), net(), {}),
    "fused attention": lambda: (net(), net(setting("attention.how", "torch")), {}),
    "a softmax in fp32": lambda: (net(setting("attention.how", "fp32")), net(setting("attention.how", "torch")), {}),
    "a gradient of zero under Adam": lambda: (net(), net(setting("attention.how", "torch")), {"optimizer": adam(), "steps": 3}),
    "transposed product": lambda: (net(), net(transposed), {}),
    "sum in parts": lambda: (net(), net(in_parts), {}),
    "another layout": lambda: ((net(), X), (net(), X.transpose(0, 1).contiguous().transpose(0, 1)), {}),
    "a model with itself": lambda: ((shared := net()), shared, {"optimizer": adam()}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_pair_is_no_bug(name: str) -> None:
    a, b, options = HEALTHY[name]()
    found = wb.diverge(a, b, **({} if isinstance(a, tuple) else {"batch": X}) | options)
    assert found.verdict == ("identical" if name in ("the same", "a model with itself", "another layout") else "rounding"), found


@pytest.mark.parametrize(
    "knobs",
    [{"accumulation": 2, "micro_batch": 4}, {"precision": "amp_bf16"}, {"optimizer": "fused"}, {"checkpointing": "full"}],
    ids=str,
)
def test_knobs_that_only_round_are_no_bug(knobs: dict[str, Any]) -> None:
    if "checkpointing" in knobs:
        spec = wb.RunSpec(task="text-gpt", device="cpu", micro_batch=2)
    else:
        spec = wb.RunSpec(task="fashion-mlp", device="cpu", micro_batch=8)
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    found = wb.diverge(spec, spec.replace(**knobs), budget_s=600)
    assert found.verdict in ("rounding", "identical"), found
    assert torch.equal(random, torch.get_rng_state())
    assert threads == torch.get_num_threads()


def test_dropout_in_another_order_is_random() -> None:
    noisy = net(setting("drop.p", 0.5))
    other = net(setting("drop.p", 0.5))
    other.embed.register_forward_hook(lambda *_: (torch.rand(3), None)[1])
    found = wb.diverge(noisy, other, batch=X)
    assert (found.verdict, found.first and found.first.module) == ("random", "drop"), found


def test_dropout_in_one_of_the_two_only_is_a_bug() -> None:
    found = wb.diverge(net(), net(setting("drop.p", 0.5)), batch=X)
    assert (found.verdict, found.first and found.first.module) == ("bug", "drop"), found


@pytest.mark.parametrize(("noise", "verdict"), [(0.1, "random"), (0.0, "bug")])
def test_noise_that_the_loss_draws_is_random_against_ranks_whose_operators_are_not_recorded(noise: float, verdict: str) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x + noise * torch.randn_like(x) if noise else x).square().mean()  # type: ignore[no-any-return]

    def run(which: int, double: bool, steps: int, enough: Callable[[], bool]) -> Any:
        given = net() if noise else net(setting("embed.bias", nn.Parameter(torch.ones(8)))) if which else net()
        made = measure.of_pair(measure.Pair(given, X if noise or not which else 2 * X, loss), which if noise else 0, steps, double, enough)
        made = [entry for entry in made if entry.phase != "start"]
        return [entry for entry in made if entry.kind != "operator"] if which else made

    assert measure.compare(("one process", "ranks"), run, lambda now, known: None).verdict == verdict


@pytest.mark.parametrize(
    ("stop", "said"), [(measure.OutOfTime, "the budget ended; a larger budget_s="), (KeyboardInterrupt, "stopped by Ctrl-C")]
)
def test_where_no_time_is_left_for_fp64_the_size_of_the_first_difference_decides(stop: type[BaseException], said: str) -> None:
    def pair(approximate: str) -> measure.Pair:
        torch.manual_seed(0)
        return measure.Pair(nn.Sequential(nn.Linear(8, 8), nn.GELU(approximate)), X)

    pairs, left, told = (pair("none"), pair("tanh")), [100.0], list[str]()

    def run(which: int, double: bool, steps: int, enough: Callable[[], bool]) -> Any:
        if double:
            raise stop
        left[0] -= 60.0 if stop is measure.OutOfTime else 1.0
        return measure.of_pair(pairs[which], 0, steps, double, enough)

    found = measure.compare(("a", "b"), run, lambda now, known: told.append(now), left=lambda: left[0])
    assert (found.verdict, found.exact) == ("bug", None)
    assert said in found.notes[-1]
    assert "judged by the size of the first difference alone" in found.notes[-1]
    assert "remains in fp64" not in str(found)
    assert told == ["a, as it is", "b, as it is", "both in fp64"]


def test_fewer_steps_are_compared_where_the_first_training_takes_long() -> None:
    seconds, asked = [60.0], list[int]()
    spec = wb.RunSpec(task="fashion-mlp", micro_batch=8)

    def run(which: int, double: bool, steps: int, enough: Callable[[], bool]) -> Any:
        asked.append(steps)
        seconds[0] -= 20.0
        return measure.of_spec(spec, resolve(spec.task), steps, double, enough)

    found = measure.compare(("a", "b"), run, lambda now, known: None, steps=3, left=lambda: seconds[0])
    assert asked == [3, 1]
    assert found.verdict == "identical"
    assert found.notes == ("the budget ended after 1 of 3 steps: a larger budget_s= compares all",)


@pytest.mark.slow
def test_eager_and_compiled() -> None:
    def plain(approximate: str = "none") -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(approximate), nn.Linear(8, 3))

    assert wb.diverge(plain(), compiled(plain()), batch=X, budget_s=600).verdict in ("rounding", "identical")
    found = wb.diverge(plain(), compiled(plain("tanh")), batch=X, budget_s=600)
    assert (found.verdict, found.by, found.first and found.first.phase) == ("bug", "modules", "forward")


def test_what_has_another_shape_is_listed() -> None:
    found = wb.diverge(nn.Linear(8, 4), nn.Linear(8, 5), batch=X)
    assert found.notes[0] == "not compared, since their shapes differ: weight, (4, 8) and (5, 8); bias, (4,) and (5,)"


def test_a_model_that_does_not_repeat_itself_is_told() -> None:
    class Counts(nn.Linear):
        """Depends on how often any of them was called."""

        called = 0

        def forward(self, x: Tensor) -> Tensor:
            Counts.called += 1
            return super().forward(x) * Counts.called

    torch.manual_seed(0)
    one = Counts(8, 8)
    found = wb.diverge(one, copy.deepcopy(one), batch=X)
    assert (found.verdict, len(found.notes)) == ("unrepeatable", 1)
    assert found.notes[0].startswith("Counts differs from itself when it is repeated")
    assert not wb.diverge(net(), net(BUGS["eps of a norm"][0]), batch=X).notes


def test_ctrl_c_while_the_first_is_repeated_leaves_a_note() -> None:
    """The answer was that of a whole comparison, without a word."""
    pairs, exact = (measure.Pair(net(), X), measure.Pair(net(BUGS["eps of a norm"][0]), X)), list[int]()

    def run(which: int, double: bool, steps: int, enough: Callable[[], bool]) -> Any:
        exact.extend([which] * double)
        if len(exact) == 3:
            raise KeyboardInterrupt
        return measure.of_pair(pairs[which], 0, steps, double, enough)

    found = measure.compare(("a", "b"), run, lambda now, known: None)
    assert (exact, found.verdict) == ([0, 1, 0], "bug")
    assert found.notes == ("stopped by Ctrl-C while a was repeated in fp64: whether it differs from itself is not known",)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a module of torch\.jit cannot be recorded"):
        wb.diverge(net(), torch.jit.script(nn.Linear(8, 8)), batch=X)
    with pytest.raises(ValueError, match="a module needs a batch"):
        wb.diverge(net(), net())
    with pytest.raises(ValueError, match="two specs or tasks"):
        wb.diverge("text-gpt", net(), batch=X)
    with pytest.raises(ValueError, match="allowed are a RunSpec"):
        wb.diverge(3, 4, batch=X)
    with pytest.raises(ValueError, match="a step of the one has 16 samples, of the other 8"):
        wb.diverge(wb.RunSpec(task="text-gpt", micro_batch=8, nproc_per_node=2), wb.RunSpec(task="text-gpt", micro_batch=8))


class Counting(nn.Linear):
    """Has a state beside its tensors."""

    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state["calls"] == 3


def test_a_state_beside_the_tensors_is_no_entry() -> None:
    torch.manual_seed(0)
    one = nn.Sequential(Counting(4, 2))
    found = wb.diverge(one, copy.deepcopy(one), batch=torch.randn(3, 4), optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1))
    assert found.verdict != "bug"
    assert "_extra_state" not in str(found)
    other = copy.deepcopy(one)
    with torch.no_grad():
        other[0].weight += 1.0
    assert "0.weight" in str(wb.diverge(one, other, batch=torch.randn(3, 4)))

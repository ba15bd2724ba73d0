"""`wb.sanity` does not blame sound trainings of unusual kinds, and names faults of losses, targets and loops."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from workbench.diagnosis.analysis.sanity import CAUSES, Check
from workbench.diagnosis.measure import sanity
from workbench.diagnosis.measure.checked_training import Training, Unjudged, observe, of_step, of_task
from workbench.diagnosis.measure.sanity_learning import STEPS_BY_HEART, overfitting
from workbench.runs.target import Step

WIDTH, CLASSES, WORDS, LENGTH = 8, 4, 32, 12
PATIENT = SimpleNamespace(left=1e3, say=lambda *_: None)


def points(count: int = 2048) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))
    return inputs, inputs[:, :CLASSES].argmax(1)


def perceptron(outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, outputs))


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def task(model: Callable[[], nn.Module] = perceptron, loss: Any = classify, data: Any = points, **changes: Any) -> wb.Task:
    made: dict[str, Any] = {"model": model, "dataset": lambda: TensorDataset(*data()), "loss": loss, "optimizer": "adam(lr=0.01)"}
    return wb.Task(**made | changes)


def checked(given: wb.Task | Training, *names: str, **knobs: Any) -> dict[str, Check]:
    training = of_task(given, wb.RunSpec(task="given", device="cpu", **knobs), ()) if isinstance(given, wb.Task) else given
    torch.manual_seed(0)
    return {check.name: check for check in sanity.check(training, PATIENT, names)}


def all_zero() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Sigmoid(), nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, CLASSES))
    for weight in model.parameters():
        nn.init.zeros_(weight)
    return model


def sentences() -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(1)
    following = torch.randperm(WORDS, generator=generator)
    tokens = torch.randint(WORDS, (512, 1), generator=generator)
    while tokens.shape[1] < LENGTH:
        tokens = torch.cat([tokens, following[tokens[:, -1:]]], 1)
    return (tokens,)


class Language(nn.Module):
    """One layer of attention, with or without a causal mask."""

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.words, self.places, self.causal = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16), causal
        self.layer, self.head = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.causal else None
        logits: Tensor = self.head(self.layer(self.words(tokens) + self.places(torch.arange(length)), src_mask=mask))
        return logits


class OwnLoss(nn.Module):
    """It shifts the tokens and computes its loss itself."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.net = Language(causal=causal)

    def forward(self, tokens: Tensor) -> Tensor:
        return next_token(self.net, (tokens,))


class Stateful(nn.Module):
    """Each call goes on from the hidden state of the last one, as in truncated backpropagation through time."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(WORDS, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, WORDS)
        self.state: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, state = self.layer(self.words(tokens), None if self.state is None or self.state.shape[1] != len(tokens) else self.state)
        self.state = state.detach()
        logits: Tensor = self.head(hidden)
        return logits


def next_token(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())


def own_token(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, :-1].flatten())


def two_ahead(model: nn.Module, batch: Any) -> Tensor:
    """As a model of several tokens at once; the head of the farther one comes first."""
    words, logits = batch[0], model(batch[0])
    far = F.cross_entropy(logits[:, :-2].flatten(0, 1), words[:, 2:].flatten())
    return 0.3 * far + F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def squared(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1].float())


def softmax_of_batch(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).softmax(0), batch[1])


def thousands(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]).squeeze(1), batch[1] * 1000.0)


def out_of_range(scale: float, shift: float) -> Callable[[nn.Module, Any], Tensor]:
    """Masks of 0 and 255, or labels of -1 and 1."""
    return lambda model, batch: F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), (batch[1] > 1) * scale + shift)


def next_but_one(model: nn.Module, batch: Any) -> Tensor:
    """As a model of Hugging Face that is given labels which are shifted already: it shifts them once more."""
    labels = F.pad(batch[0][:, 1:], (0, 2), value=-100)
    return F.cross_entropy(model(batch[0]).flatten(0, 1), labels[:, 1:].flatten())


class PlainList(nn.Module):
    """Layers in a list that is no ModuleList: no optimizer gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, CLASSES)
        self.hidden = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2)]
        self.teacher = [nn.Linear(WIDTH, 32)]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            known = self.teacher[0](x)
        x = self.body(x) + known
        for layer in self.hidden:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def learns_to_fail(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(weights, 0.01, maximize=True)


FAULTS: dict[str, tuple[wb.Task, str, str]] = {
    "minus sign": (task(loss=lambda m, b: -classify(m, b)), "initial loss", "negated_loss"),
    "[N, 1] beside [N]": (task(lambda: perceptron(1), squared), "initial loss", "broadcast_targets"),
    "softmax over the batch": (task(loss=softmax_of_batch), "initial loss", "softmax_before_cross_entropy"),
    "a rate that is far too high": (task(optimizer="sgd(lr=300)"), "overfitting", "learning_rate"),
    "an optimizer that maximises": (task(optimizer=learns_to_fail), "overfitting", "maximizes"),
    "a loss that is scaled to nothing": (task(loss=lambda m, b: classify(m, b) * 1e-8, optimizer="sgd"), "overfitting", "learning_rate"),
    "masks of 255": (task(lambda: perceptron(1), out_of_range(255.0, 0.0)), "initial loss", "targets_out_of_range"),
    "labels of -1": (task(lambda: perceptron(1), out_of_range(2.0, -1.0)), "initial loss", "targets_out_of_range"),
    "labels that are shifted twice": (task(Language, next_but_one, sentences), "label alignment", "shifted_twice"),
    "targets in thousands": (task(lambda: perceptron(1), thousands), "overfitting", "target_scale"),
    "all weights zero": (task(all_zero), "gradient flow", "same_units"),
    "all labels the same": (task(data=lambda: (points()[0], points()[1] * 0)), "label alignment", "constant_targets"),
    "shuffled labels": (task(data=lambda: (points()[0], points()[1][torch.randperm(2048)])), "label alignment", "labels_carry_nothing"),
    "labels of the next sample": (task(data=lambda: (points()[0], points()[1].roll(1))), "label alignment", "labels_carry_nothing"),
    "targets that are not moved": (task(Language, own_token, sentences), "label alignment", "targets_are_inputs"),
    "no causal mask, nor logits": (
        task(lambda: OwnLoss(causal=False), lambda m, b: m(b[0]), sentences),
        "label alignment",
        "sees_its_targets",
    ),
    "no causal mask": (task(lambda: Language(causal=False), next_token, sentences), "label alignment", "sees_its_targets"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str) -> None:
    planted, check, cause = FAULTS[name]
    found = checked(planted, check)[check]
    assert (found.passed, found.cause) == (False, cause), found
    assert found.advice == CAUSES[cause]


def masked_places(x: Tensor) -> Tensor:
    """As a masked autoencoder: a random order says which are left out."""
    return x * torch.ones_like(x).scatter(1, torch.rand(x.shape).argsort(1)[:, :8], 0.0)


def flow(x: Tensor) -> Tensor:
    """As flow matching: random times, and noise."""
    times = torch.rand(len(x), 1)
    return x * (1 - times) + times * torch.randn_like(x)


def stochastic_depth(x: Tensor) -> Tensor:
    return x * (0.7 + torch.rand(len(x), 1)).floor_()


def attention_dropout(x: Tensor) -> Tensor:
    keys = x[:, None] * torch.arange(1, 5)[:, None]
    return F.scaled_dot_product_attention(x[:, None], keys, keys, dropout_p=0.3)[:, 0]


@pytest.mark.parametrize(
    ("draw", "passed", "calls"),
    [
        (masked_places, None, "torch.rand"),
        (lambda x: x[:, torch.randperm(32)], None, "torch.randperm"),
        (flow, None, "torch.randn_like"),
        (F.gumbel_softmax, None, "torch.nn.functional.gumbel_softmax"),
        (lambda x: x * (torch.rand(x.shape) < 0.7), False, ""),
        (stochastic_depth, False, ""),
        (lambda x: x * torch.empty(len(x), 1).bernoulli_(0.7) + 0 * torch.randn(1), False, ""),
        (lambda x: F.dropout(x + torch.randn_like(x), 0.3), False, ""),
        (attention_dropout, False, ""),
    ],
)
def test_what_is_drawn_on_purpose_in_evaluation_is_only_doubtful(draw: Callable[[Tensor], Tensor], passed: bool | None, calls: str) -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(draw(self.body(x)))
            return logits

    found = checked(task(Draws), "modes")["modes"]
    assert (found.passed, found.cause) == (passed, "random_in_eval"), found
    assert ("calls" in found.figure) == bool(calls)
    assert found.figure.endswith(calls)


def test_layers_that_are_not_registered_are_doubtful() -> None:
    """What runs without gradients, as a teacher does, may be kept in a list, and so may a fixed network whose gradients are not used."""
    found = checked(task(PlainList), "gradient flow")["gradient flow"]
    assert (found.passed, found.cause) == (None, "not_registered")
    assert (found.figure, found.place) == ("2 modules with weights in no model", "hidden[0], hidden[1]")


class Twins(nn.Module):
    """Two inputs, one encoder: the bias of its last layer is no part of their difference."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = perceptron()

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        difference: Tensor = self.encoder(first) - self.encoder(second)
        return difference


def apart(model: nn.Module, batch: Any) -> Tensor:
    distance = model(batch[0], batch[0].flip(0)).norm(dim=1)
    return (distance - (batch[1] - batch[1].flip(0)).abs()).square().mean()


class Variational(nn.Module):
    """It draws its code in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread, self.decode = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.mean(x), self.spread(x)
        return self.decode(mean + torch.randn_like(mean) * spread), mean.square() + spread.square()


def elbo(model: nn.Module, batch: Any) -> Tensor:
    chances, size = torch.sigmoid(batch[0] * 3), 0.01
    outputs, prior = model(chances)
    return F.binary_cross_entropy_with_logits(outputs, chances) + size * prior.mean()


def denoise(model: nn.Module, batch: Any) -> Tensor:
    """As a diffusion model: the noise that was added is to be predicted."""
    noise = torch.randn_like(batch[0])
    return F.mse_loss(model(batch[0] * 0.3 + noise), noise)


def contrast(model: nn.Module, batch: Any) -> Tensor:
    first, second = (F.normalize(model(batch[0] + 0.1 * sign), dim=1) for sign in (1, -1))
    return F.cross_entropy(first @ second.T * 5, torch.arange(len(first)))


def likelihood(model: nn.Module, batch: Any) -> Tensor:
    """Negative from the start, and lower for the right class."""
    return classify(model, batch) - 5.0


def smoothed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.2)


class Pairs(nn.Module):
    """As CLIP, it returns how alike each two samples are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = perceptron(8), perceptron(8)

    def forward(self, x: Tensor) -> Tensor:
        likeness: Tensor = 5 * F.normalize(self.first(x), dim=1) @ F.normalize(self.second(x), dim=1).T
        return likeness


def pairs(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), torch.arange(len(batch[0])))


def warm() -> tuple[Tensor, Tensor]:
    """Temperatures in degrees, whose mean is not zero."""
    inputs = points(4096)[0]
    return inputs, 15 + 8 * torch.tanh(inputs[:, :1])


def rare() -> tuple[Tensor, Tensor]:
    """Half a percent of the samples are of the second class."""
    inputs = points(8192)[0]
    return inputs, (inputs[:, 0] + inputs[:, 1] > 3.6).long()


def missing(**options: Any) -> Callable[[nn.Module, Any], Tensor]:
    """A loss of several labels, of which some are not known: those are -1, and are left out."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        labels = torch.where(batch[0][:, :CLASSES] > 0.8, -1.0, (batch[0][:, :CLASSES] > 0).float())
        known = (labels >= 0).float()
        if options:
            return (F.binary_cross_entropy_with_logits(model(batch[0]), labels, **options) * known).mean()
        return F.binary_cross_entropy_with_logits(model(batch[0]), labels, weight=known)

    return loss


class Masked(nn.Module):
    """It is given tokens, and a mask of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.head(self.words(tokens) * mask[..., None])
        return logits


def masked(model: nn.Module, batch: Any) -> Tensor:
    tokens = batch[0][:, :-1]
    return F.cross_entropy(model(tokens, torch.ones(tokens.shape)).flatten(0, 1), batch[0][:, 1:].flatten())


class Margin(nn.Module):
    """As ArcFace: cosines times a scale, of which the right ones are made smaller on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes = perceptron(8), nn.Parameter(torch.randn(CLASSES, 8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        cosines = F.linear(F.normalize(self.body(x)), F.normalize(self.classes))
        return 30 * (cosines - 0.3 * F.one_hot(labels, CLASSES))


class Half(nn.Module):
    """Weights in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, CLASSES)).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x.bfloat16()).float()
        return logits


def counts(model: nn.Module, batch: Any) -> Tensor:
    return F.poisson_nll_loss(model(batch[0]).squeeze(1), 4.0 + batch[1], full=True)


SOUND: dict[str, tuple[wb.Task, tuple[str, ...]]] = {
    "twins": (task(Twins, apart), ("gradient flow",)),
    "variational": (task(Variational, elbo), ("modes", "accumulation", "overfitting", "label alignment")),
    "diffusion": (task(lambda: perceptron(WIDTH), denoise), ("modes", "accumulation", "overfitting")),
    "contrastive": (task(loss=contrast), ("accumulation",)),
    "smoothed labels": (task(loss=smoothed), ("overfitting", "label alignment")),
    "pairs of samples": (task(Pairs, pairs), ("batch independence", "accumulation")),
    "targets that are not centred": (
        task(lambda: perceptron(1), lambda m, b: F.huber_loss(m(b[0]), b[1]), warm, optimizer="adam(lr=0.001)"),
        ("overfitting", "label alignment"),
    ),
    "a rare class": (task(lambda: perceptron(2), data=rare, optimizer="adam(lr=0.001)"), ("label alignment",)),
    "labels that are missing": (task(loss=missing(reduction="none")), ("initial loss",)),
    "labels of weight 0": (task(loss=missing()), ("initial loss",)),
    "two tokens at once": (task(Language, two_ahead, sentences), ("label alignment",)),
    "a mask of ones": (task(Masked, masked, sentences), ("inputs",)),
    "a margin": (task(Margin, lambda m, b: F.cross_entropy(m(*b), b[1])), ("initial loss",)),
    "counts": (task(lambda: perceptron(1), counts), ("overfitting",)),
    "a loss below zero": (task(loss=likelihood), ("initial loss", "overfitting", "label alignment")),
    "a hidden state that is kept": (task(Stateful, next_token, sentences), ("label alignment",)),
    "a loss in the model": (task(lambda: OwnLoss(causal=True), lambda m, b: m(b[0]), sentences), ("label alignment",)),
    "language": (task(Language, next_token, sentences), ("gradient flow", "label alignment")),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_trainings_of_unusual_kinds_are_not_blamed(name: str) -> None:
    sound, checks = SOUND[name]
    found = checked(sound, *checks)
    assert [check for check in found.values() if check.passed is False] == []


def test_rounding_in_bf16_is_no_fault_of_micro_batches() -> None:
    found = checked(task(Half), "accumulation", accumulation=2)["accumulation"]
    assert found.passed, found


def slope(model: nn.Module, batch: Any) -> Tensor:
    """As in a network that solves a differential equation, the gradient of the inputs is part of the loss."""
    inputs = batch[0].clone().requires_grad_()
    outputs = model(inputs)
    (grad,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return (grad.sum(1) + outputs[:, 0]).square().mean()


def test_a_loss_of_gradients_is_checked_as_others_are() -> None:
    found = checked(
        task(loss=slope, model=lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))), "batch independence", "modes"
    )
    assert found["batch independence"].passed, found
    assert found["modes"].passed, found


def test_what_repeats_by_itself_and_what_is_sorted_is_no_fault() -> None:
    """Samples of one or two whole numbers are often equal, and data sorted by class has batches of a single target."""
    few = task(lambda: nn.Embedding(6, CLASSES), data=lambda: (torch.randint(6, (512,)), torch.randint(CLASSES, (512,))))
    assert checked(few, "duplicates")["duplicates"].passed is None
    training = of_task(task(), wb.RunSpec(task="given", device="cpu"), ())
    inputs, labels = points()
    order = labels.argsort()
    training.stream = lambda: iter(DataLoader(TensorDataset(inputs[order], labels[order]), 32))
    found = checked(training, "label alignment")["label alignment"]
    assert (found.passed, "sorted" in found.figure) == (None, True), found


def test_a_data_set_of_one_sample_need_not_be_learnt_by_heart() -> None:
    """A graph may be all that there is: its nodes are no few samples."""
    noise = torch.randn(1, 400, WIDTH), torch.randint(CLASSES, (1, 400))

    def of_nodes(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    found = checked(task(loss=of_nodes, data=lambda: noise), "overfitting")["overfitting"]
    assert (found.passed, "all of the data" in found.figure) == (None, True), found


@pytest.mark.parametrize(("dead", "passed", "cause"), [(20, True, ""), (40, None, "dead_units"), (60, False, "dead_units")])
def test_a_layer_of_which_about_half_of_the_units_are_never_active_is_doubtful(dead: int, passed: bool | None, cause: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    with torch.no_grad():
        model[0].bias[:dead] -= 50.0
    found = checked(task(lambda: model), "active units")["active units"]
    assert (found.passed, found.cause) == (passed, cause), found


def test_a_deep_network_with_default_weights_is_not_blamed_for_its_dead_units() -> None:
    """Its activations hardly depend on the input, and more than half of the units of a layer may be off at first."""

    def deep() -> nn.Module:
        torch.manual_seed(0)
        hidden = [layer for _ in range(9) for layer in (nn.Linear(64, 64), nn.ReLU())]
        return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), *hidden, nn.Linear(64, CLASSES))

    found = checked(task(deep, optimizer="adam(lr=0.001)"), "active units")["active units"]
    assert (found.passed, found.cause) == (None, "dead_units"), found


@pytest.mark.parametrize("lowered", [lambda loss, by: (loss - by).abs() + by, lambda loss, by: torch.sub(loss, other=by) + by])
def test_a_tensor_may_be_subtracted_from_the_loss(lowered: Callable[[Tensor, Tensor], Tensor]) -> None:
    """As flooding does: neither has a shape to compare, and one may be given by name."""
    found = checked(task(loss=lambda m, b: lowered(classify(m, b), torch.tensor(0.1))), "initial loss")
    assert found["initial loss"].passed, found


class Adversaries(nn.Module):
    """A generator and a critic, of which each gets the gradients of its own part of the loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.makes, self.judges = perceptron(WIDTH), perceptron(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = self.makes(torch.randn_like(x))
        fixed = {name: weight.detach() for name, weight in self.judges.named_parameters()}
        return self.judges(x), self.judges(made.detach()), torch.func.functional_call(self.judges, fixed, (made,))


def adversarial(model: nn.Module, batch: Any) -> Tensor:
    known, invented, fools = model(batch[0])
    bce = F.binary_cross_entropy_with_logits
    return bce(known, torch.ones_like(known)) + bce(invented, torch.zeros_like(invented)) + bce(fools, torch.ones_like(fools))


@pytest.mark.parametrize("as_step", [False, True])
def test_parts_of_a_loss_that_work_against_each_other_need_not_fall(as_step: bool) -> None:
    given: wb.Task | Training = task(Adversaries, adversarial, optimizer="adam(lr=0.0002)")
    if as_step:
        given = of_task(given, wb.RunSpec(task="given", device="cpu"), ())  # type: ignore[arg-type]
        given.loss = None
    found = checked(given, "overfitting")["overfitting"]
    assert found.passed is None, found


@pytest.mark.parametrize(("parts", "passed"), [(1, False), (2, None)])
def test_a_loss_that_never_falls_is_a_fault_if_it_is_known_how_far_it_could(parts: int, passed: bool | None) -> None:
    def blind(model: nn.Module, batch: Any) -> Tensor:
        """The logits are scaled to nothing, and each class is as frequent as the others."""
        labels = torch.arange(len(batch[0])) % CLASSES
        logits = model(batch[0]) * 1e-9
        return sum((F.cross_entropy(logits, labels) for _ in range(parts)), torch.zeros(()))

    found = checked(task(loss=blind), "overfitting", "label alignment")
    assert (found["overfitting"].passed, found["overfitting"].cause) == (passed, "does_not_overfit"), found
    assert found["label alignment"].figure == "the training does not even learn a few samples"


class Codebook(nn.Module):
    """In training mode each batch moves the codes a little, before or after they are looked up; or its mean is subtracted."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.body, self.head = how, perceptron(8), nn.Linear(8, CLASSES)
        self.register_buffer("codes", torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.body(x)
        nearest = torch.cdist(inside, self.codes).argmin(1)
        if self.how == "mean":
            inside = inside - inside.mean(0)
        codes = self.codes.clone()
        if self.training:
            self.codes += 0.1 * inside.detach().mean(0)
        logits: Tensor = self.head(inside + (self.codes if self.how == "before" else codes)[nearest].detach())
        return logits


@pytest.mark.parametrize(("how", "passed"), [("before", None), ("after", True), ("mean", False)])
def test_a_codebook_that_each_batch_updates_is_no_leak(how: str, passed: bool | None) -> None:
    found = checked(task(lambda: Codebook(how)), "batch independence")["batch independence"]
    assert (found.passed, found.cause) == (passed, "" if passed else "batch_leak"), found
    assert ("in training mode alone" in found.figure) == (how == "before")


@pytest.mark.parametrize(("divided", "passed", "cause"), [(True, None, "unequal_micro_batches"), (False, False, "sum_reduction")])
def test_a_loss_over_the_number_of_positives_is_no_sum(divided: bool, passed: bool | None, cause: str) -> None:
    """As of a focal loss: of the first eight samples at most one is positive."""
    labels, order = torch.zeros(2048, CLASSES), torch.randperm(2048, generator=torch.Generator().manual_seed(0))
    labels[order[8:32], order[8:32] % CLASSES] = 1.0

    def focal(model: nn.Module, batch: Any) -> Tensor:
        each = F.binary_cross_entropy_with_logits(model(batch[0]) - 3.0, batch[1], reduction="none")
        return each.sum() / (batch[1].sum().clamp_min(1) if divided else 1.0)

    found = checked(task(loss=focal, data=lambda: (points()[0], labels)), "accumulation", seed=0)["accumulation"]
    assert (found.passed, found.cause) == (passed, cause), found


class Translator(nn.Module):
    """An encoder, and a decoder that is given what it has written so far; it may move this by one token itself."""

    def __init__(self, *, moves: bool) -> None:
        super().__init__()
        self.moves, self.words, self.head = moves, nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.reads, self.writes = nn.GRU(16, 16, batch_first=True), nn.GRU(16, 16, batch_first=True)

    def forward(self, source: Tensor, written: Tensor) -> Tensor:
        written = F.pad(written[:, :-1], (1, 0)) if self.moves else written
        logits: Tensor = self.head(self.writes(self.words(written), self.reads(self.words(source))[1])[0])
        return logits


@pytest.mark.parametrize("moves", [True, False])
def test_a_decoder_that_is_given_its_own_targets_is_named(moves: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[0].flip(1)).flatten(0, 1), batch[0].flip(1).flatten())

    found = checked(task(lambda: Translator(moves=moves), loss, sentences), "label alignment")["label alignment"]
    assert (found.passed, found.cause) == ((True, "") if moves else (False, "targets_are_inputs")), found


def test_weights_of_classes_lose_no_check() -> None:
    found = checked(task(loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=torch.arange(1.0, CLASSES + 1))), "initial loss")[
        "initial loss"
    ]
    assert found.passed, found


def test_a_first_loss_that_is_low_by_chance_is_no_rise() -> None:
    def noisy() -> tuple[Tensor, Tensor]:
        inputs, noise = points(512)[0], torch.randn(512, generator=torch.Generator().manual_seed(2))
        return inputs, (inputs[:, 0] + 3 * noise)[:, None]

    for seed in range(4):
        line = task(lambda: nn.Linear(WIDTH, 1), lambda m, b: F.mse_loss(m(b[0]), b[1]), noisy, optimizer="sgd(lr=1e-4)")
        assert checked(line, "label alignment", micro_batch=4, seed=seed)["label alignment"].cause != "rate_too_high"


def test_labels_are_learnt_in_training_mode() -> None:
    modes: list[bool] = []

    def watched(model: nn.Module, batch: Any) -> Tensor:
        modes.append(model.training)
        return next_token(model, batch)

    checked(task(Language, watched, sentences), "label alignment")
    assert modes.count(False) == 0


def test_targets_that_are_all_left_out_are_no_error() -> None:
    found = checked(task(loss=lambda m, b: F.cross_entropy(m(b[0]), b[1] * 0 - 100).nan_to_num()), "initial loss")["initial loss"]
    assert "could not be tried" not in found.figure


@pytest.mark.parametrize("rate", [8, 1000])
def test_a_rate_that_ruins_the_training_is_not_blamed_on_the_labels(rate: int) -> None:
    found = checked(task(optimizer=f"sgd(lr={rate})"), "label alignment")["label alignment"]
    assert found.passed is None, found
    assert found.cause == ("rate_too_high" if rate == 1000 else ""), found  # at 8, single losses come back below the first


def words() -> tuple[Tensor, Tensor]:
    texts = torch.randint(500, (2000, 8), generator=torch.Generator().manual_seed(17))
    return texts, ((texts < 250).sum(1) > 4).long()


def bag() -> nn.Module:
    """As fastText: of its embeddings, each step moves a few, and those a little."""
    return nn.Sequential(nn.EmbeddingBag(500, 16), nn.Linear(16, 2))


def test_embeddings_that_learn_slowly_are_not_blamed_on_their_labels() -> None:
    """After one pass the loss may be lower by chance alone, and it surely is after several."""
    results = [
        checked(task(bag, data=words, optimizer="sgd(lr=0.5)"), "overfitting", "label alignment", seed=seed)["label alignment"]
        for seed in (3, 5)
    ]
    assert not [found for found in results if found.passed is False]
    assert [found for found in results if found.passed and "after 4 passes over them" in found.figure]
    wrong = task(bag, data=lambda: (words()[0], words()[1].roll(1)), optimizer="sgd(lr=0.5)")
    found = checked(wrong, "overfitting", "label alignment")["label alignment"]
    assert (found.passed, found.cause) == (False, "labels_carry_nothing"), found


def test_few_positive_labels_are_a_rare_class() -> None:
    """As clicks: one in 40 samples, of which 150 batches hold too few to tell."""

    def clicks() -> tuple[Tensor, Tensor]:
        return points(8192)[0], (torch.rand(8192, generator=torch.Generator().manual_seed(4)) < 0.025).float()

    def weighted(model: nn.Module, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1], pos_weight=torch.tensor(10.0))

    found = checked(task(lambda: perceptron(1), weighted, clicks, optimizer="adam(lr=0.001)"), "label alignment")["label alignment"]
    assert (found.passed, found.cause) == (None, "labels_carry_nothing"), found
    assert "are not of the most frequent class; with 250 of these this would be a fault" in found.figure


def test_a_later_batch_with_nan_is_named_rather_than_the_learning_rate() -> None:
    def broken() -> tuple[Tensor, Tensor]:
        inputs, labels = points()
        order = torch.randperm(2048, generator=torch.Generator().manual_seed(0))
        inputs[order[700], 3] = torch.nan
        return inputs, labels

    found = checked(task(data=broken), "inputs", "label alignment", seed=0)
    assert found["inputs"].passed, found
    alignment = found["label alignment"]
    assert (alignment.passed, alignment.cause) == (False, "nonfinite_inputs"), alignment
    assert "with batch 22, which has 1 such value" in alignment.figure


def test_shuffled_targets_that_are_ruled_out_are_no_fault() -> None:
    """As of a contrastive loss in which no sample is its own partner: shuffled, some are."""

    def others(model: nn.Module, batch: Any) -> Tensor:
        outputs, count = F.normalize(model(batch[0].repeat(2, 1) + 0.1 * torch.randn(64, WIDTH)), dim=1), 64
        alike = (5 * outputs @ outputs.T).masked_fill(torch.eye(count, dtype=torch.bool), -torch.inf)
        return F.cross_entropy(alike, torch.arange(count).roll(32))

    found = checked(task(loss=others), "label alignment")["label alignment"]
    assert (found.passed, found.cause) == (None, ""), found
    assert "with shuffled labels alone" in found.figure


def test_a_loss_that_becomes_negative_is_not_judged() -> None:
    """A little above zero at first, it may fall to -1."""

    def alike(model: nn.Module, batch: Any) -> Tensor:
        return 0.01 - F.cosine_similarity(model(batch[0]), F.one_hot(batch[1], CLASSES).float()).mean() + model[2].weight.sum() * 0

    found = checked(task(loss=lambda m, b: alike(m, b) + 0.3), "overfitting")["overfitting"]
    assert found.passed is None, found


def test_what_is_only_doubtful_is_told() -> None:
    assert checked(task(Twins, apart), "gradient flow")["gradient flow"].cause == "cancelled_bias"
    assert "torch.randn_like" in checked(task(Variational, elbo), "modes")["modes"].figure
    several = checked(task(loss=contrast), "accumulation", accumulation=2)["accumulation"]
    assert (several.passed, several.cause) == (False, "batch_statistics")


def test_an_evaluation_that_cannot_work_is_found_before_the_training() -> None:
    def no_label(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        raise KeyError("label")

    given = task(validation=lambda: TensorDataset(*points(40)), evaluate=no_label)
    found = checked(given, "modes")["modes"]
    assert (found.passed, found.cause, found.figure) == (False, "error", "evaluate fails: KeyError: 'label'")


def test_a_language_model_is_not_blamed_after_a_few_steps() -> None:
    """In so few steps it learns nothing from right targets, either."""
    few = task(Language, next_token, lambda: (sentences()[0][:256],), optimizer="adam(lr=1e-5)")
    found = checked(few, "label alignment", micro_batch=16)["label alignment"]
    assert found.passed is None, found
    assert "with 50 steps this would be a fault" in found.figure


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("clears", [True, False])
def test_gradients_that_are_never_set_to_zero_are_named(clears: bool, clips: bool) -> None:
    """Clipped gradients add up, too, but are not the sum of all that arrived: it was missed."""
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(batch: Any) -> Tensor:
        loss = classify(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if clears:
            optimizer.zero_grad()
        return loss

    with of_step(Step(step=step, loader=DataLoader(TensorDataset(*points()), 32)), ()) as training:
        found = checked(training, "gradient flow")["gradient flow"]
    assert (found.passed, found.cause) == ((True, "") if clears else (False, "gradients_add_up"))


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("no step", "never_stepped"),
        ("step before backward", "never_stepped"),
        ("zero_grad in between", "never_stepped"),
        ("zeros in between", "never_stepped"),
        ("a rule of its own", ""),
        ("8 micro-batches", ""),
        ("100 micro-batches", "never_stepped"),
    ],
)
def test_gradients_with_which_no_optimizer_steps_are_named(how: str, cause: str) -> None:
    """They arrive, so no detach() is to blame; and a loop may update its weights itself, or not in each call."""
    model, calls = perceptron(), [0]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def step(batch: Any) -> Tensor:
        calls[0] += 1
        loss = classify(model, batch)
        if how == "a rule of its own":
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for weight, grad in zip(model.parameters(), grads, strict=True):
                    weight -= 0.1 * grad
            return loss
        if how == "step before backward":
            optimizer.zero_grad()
            optimizer.step()
        loss.backward()  # type: ignore[no-untyped-call]
        if how.endswith("in between"):
            optimizer.zero_grad(set_to_none=how.startswith("zero_grad"))
            optimizer.step()
        if how.endswith("micro-batches") and calls[0] % int(how.split()[0]) == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    with of_step(Step(step=step, loader=DataLoader(TensorDataset(*points()), 32)), ()) as training:
        found = checked(training, "gradient flow", "overfitting")
    gradients, by_heart = found["gradient flow"], found["overfitting"]
    surely = how.startswith(("step", "zero"))  # where no optimizer was seen to step, it may step later
    assert (gradients.passed, gradients.cause) == (not cause if surely or not cause else None, cause), found
    if how == "no step":
        assert (by_heart.passed, by_heart.cause) == (False, "never_stepped"), found  # nor in the next 200 calls
    if how == "100 micro-batches":
        assert (by_heart.passed, "only 2 of them updated" in by_heart.figure) == (None, True), found


def test_no_more_steps_are_watched_than_there_is_time_for() -> None:
    """An optimizer that does not step in each call must not take the time of all checks."""
    model, calls = perceptron(), [0]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def step(batch: Any) -> Tensor:
        calls[0] += 1
        loss = classify(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if calls[0] % 1000 == 0:
            optimizer.step()
        return loss

    with of_step(Step(step=step, loader=DataLoader(TensorDataset(*points()), 32)), ()) as training:
        observe(training, seconds=0.0)
        assert calls[0] == 4
        given = training, observe(training, seconds=0.0), SimpleNamespace(left=-1.0, say=lambda *_: None), {}
        with pytest.raises(Unjudged, match="none of them updated the weights"):
            overfitting(*given)


def test_a_rate_that_a_schedule_takes_to_zero_is_no_fault_of_the_model() -> None:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), 0.003)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)  # called once a batch, not once an epoch

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        return loss

    with of_step(Step(step=step, loader=DataLoader(TensorDataset(*points()), 32)), ()) as training:
        found = checked(training, "overfitting")["overfitting"]
    assert found.passed is None, found
    assert "the learning rate falls from 0.003 to " in found.figure


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [("model[1].*", True), ("model[1].0.weight", True), ("*.weight", True), ("2.bia[s]", True), ("model[2].*", False), ("0.weihgt", False)],
)
def test_a_pattern_of_frozen_parameters_that_fits_none_is_noted(pattern: str, matches: bool) -> None:
    models = [perceptron(), perceptron()]
    training = Training(lambda batch: None, models, [], lambda: iter(()), frozen=[pattern])
    unknown = f"No parameter matches frozen='{pattern}'; the last one is called model[1].2.bias."
    assert training.notes == [unknown] * (not matches)
    names = [(training.prefix(number), name) for number, model in enumerate(models) for name, _ in model.named_parameters()]
    assert any(training.is_frozen(*name) for name in names) == matches


@pytest.mark.parametrize(
    ("how", "passed", "cause"),
    [
        ("no_grad", True, ""),
        ("requires_grad_(False)", True, ""),
        ("frozen=", True, ""),
        ("evaluation mode", None, "model_not_in_optimizer"),
        ("training mode", False, "model_not_in_optimizer"),
        ("both detached", False, "detached"),
    ],
)
def test_a_teacher_in_no_optimizer_needs_no_gradient(how: str, passed: bool | None, cause: str) -> None:
    """If it gets gradients, its optimizer was forgotten, or they are for nothing."""
    student, teacher = perceptron(), perceptron().train(how in ("training mode", "frozen="))
    teacher.requires_grad_(how != "requires_grad_(False)")
    optimizer = torch.optim.Adam(student.parameters(), 0.01)

    def step(batch: Any) -> Tensor:
        with torch.set_grad_enabled(how != "no_grad"):
            known = teacher(batch[0])
        found = student[2](student[:2](batch[0]).detach()) if how == "both detached" else student(batch[0])
        known = known.detach() if how == "both detached" else known
        loss = F.mse_loss(found, known) + F.cross_entropy(found, batch[1])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    given = Step(step=step, loader=DataLoader(TensorDataset(*points()), 32), model=[student, teacher], optimizer=optimizer)
    with of_step(given, ("model[1].*",) if how == "frozen=" else ()) as training:
        found = checked(training, "gradient flow")["gradient flow"]
    assert (found.passed, found.cause) == (passed, cause), found
    assert ("model[1] in no optimizer and without a gradient" in found.figure) == (how in ("no_grad", "requires_grad_(False)"))
    if cause == "model_not_in_optimizer":
        assert (found.place, "torch.no_grad()" in found.advice) == ("model[1]", True), found
        assert found.figure == "1 of 2 models with gradients, but in no optimizer"


@pytest.mark.parametrize("detached", [False, True])
def test_two_models_that_train_against_each_other(detached: bool) -> None:
    """The targets of each loss are all equal, and the gradients that one model gets from the other's loss are set to zero."""
    makes, judges = perceptron(WIDTH), perceptron(1)
    optimizers = [torch.optim.Adam(model.parameters(), 1e-3) for model in (makes, judges)]

    def step(batch: Any) -> Tensor:
        made = makes(torch.randn_like(batch[0]))
        optimizers[1].zero_grad()
        known, invented = judges(batch[0]), judges(made.detach())
        doubt = F.binary_cross_entropy_with_logits(known, torch.ones_like(known))
        doubt = doubt + F.binary_cross_entropy_with_logits(invented, torch.zeros_like(invented))
        doubt.backward()  # type: ignore[no-untyped-call]
        optimizers[1].step()
        optimizers[0].zero_grad()
        verdict = judges(made.detach() if detached else made)
        loss = F.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers[0].step()
        return loss

    given = Step(step=step, loader=DataLoader(TensorDataset(*points()), 32), model=[makes, judges], optimizer=optimizers)
    with of_step(given, ()) as training:
        found = checked(training, "gradient flow", "label alignment")
    assert found["label alignment"].passed is None
    assert found["gradient flow"].passed is not detached
    if detached:
        assert found["gradient flow"].place.startswith("model[0].")


class Hurried:
    """Time that ends after some steps."""

    def __init__(self, steps: int) -> None:
        self.left = float(steps)

    def say(self, *_: Any) -> None:
        self.left -= 1


@pytest.mark.parametrize("steps", [20, 2000])
def test_a_loss_that_still_falls_when_time_ends_is_no_fault(steps: int) -> None:
    """A U-Net with steps of 1.2 s "does not overfit", in 17 of 200 steps: it had no time for more."""
    training = of_task(task(optimizer="sgd(lr=0.002)"), wb.RunSpec(task="given", device="cpu"), ())
    seen = observe(training)
    if steps > STEPS_BY_HEART:
        overfitting(training, seen, Hurried(steps), {})
    else:
        with pytest.raises(Unjudged, match=r"\d+ of 200 steps fitted into the budget; give a larger budget_s"):
            overfitting(training, seen, Hurried(steps), {})


def test_a_schedule_that_steps_too_often_is_no_fault_of_the_labels() -> None:
    """StepLR(gamma=0.1) in each batch: the labels were said to carry nothing, since nothing was learnt after three steps."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)

    def step(batch: Any) -> Tensor:
        loss = classify(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        return loss

    with of_step(Step(step=step, loader=DataLoader(TensorDataset(*points(4096)), 32)), ()) as training:
        found = checked(training, "label alignment")["label alignment"]
    assert found.passed is None
    assert "does a schedule step too often?" in found.figure

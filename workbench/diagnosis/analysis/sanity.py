"""SanityReport: what checks of a model, its loss and its data have shown before a large run, and which fault to fix first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.core.brief import fitted, short
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display

CHECKS: Mapping[str, str] = {
    "inputs": "inputs are finite and of a usual size",
    "duplicates": "samples of a batch differ",
    "initial loss": "the loss before training is that of chance",
    "active units": "no layer of ReLUs is dead",
    "gradient flow": "every parameter gets a gradient",
    "batch independence": "an output depends on its own sample alone",
    "modes": "evaluation is repeatable, and training mode comes back",
    "accumulation": "micro-batches add up to the gradient of the batch",
    "overfitting": "a few samples can be learnt by heart",
    "label alignment": "true labels are easier to learn than shuffled ones",
}
"""Check → what holds where it is passed, in the order in which a fault causes others: of several, the first is the cause."""

CAUSES: Mapping[str, str] = {
    "nonfinite_inputs": "find the samples with NaN or infinite values, and fix or drop them: torch.isfinite(x).all() in the dataset",
    "input_scale": "normalise the inputs to a mean near 0 and a deviation near 1, in the dataset or by a first layer",
    "constant_inputs": "look at what the dataset returns: all samples are the same number",
    "duplicate_samples": "look at the sampler and at the dataset: the same sample is given again and again",
    "nonfinite_loss": "look for log(0), 0/0, sqrt(0) and targets out of range; torch.autograd.set_detect_anomaly(True) names the operator",
    "softmax_before_cross_entropy": "give cross_entropy the logits: it takes the softmax itself",
    "sigmoid_before_logits_loss": "give binary_cross_entropy_with_logits the logits: it takes the sigmoid itself",
    "no_log_softmax": "give nll_loss and kl_div log-probabilities: the log_softmax of the logits, or cross_entropy in place of nll_loss",
    "sum_reduction": "return the mean over the batch (reduction='mean'): with a sum the learning rate depends on the batch size",
    "negated_loss": "look for a minus sign: the loss is torch's, negated, and training makes the predictions worse",
    "targets_out_of_range": "give binary cross entropy targets from 0 to 1: divide masks by 255, and turn labels of -1 into 0",
    "broadcast_targets": "give outputs and targets the same shape, as by output.squeeze(1): each output is compared with each target",
    "wrong_reduction": "divide the loss by the number of its targets once: the value is that of the mean, divided again",
    "large_logits": "make the last layer's initial weights smaller: a fresh model should know nothing, not be sure of wrong answers",
    "dead_units": "look at the initial weights and biases of the layer before it (kaiming_normal_, bias 0), and at the inputs' scale",
    "frozen": "set requires_grad to True; where it is meant so, say it: sanity(…, frozen=['backbone.*'])",
    "detached": "no path leads from the loss to the module: look for detach(), .data, no_grad, argmax or numpy after it",
    "unused": "the loss does not use the module: call it in forward, or remove it",
    "not_in_optimizer": "give the optimizer all parameters: model.parameters(), after the last layer was added",
    "model_not_in_optimizer": "give an optimizer its parameters; or, of a teacher, call it in torch.no_grad() or set requires_grad_(False)",
    "not_registered": "no optimizer finds layers in a plain list: use nn.ModuleList; if they are fixed on purpose, requires_grad_(False)",
    "never_stepped": "call optimizer.step() after loss.backward(), and zero_grad() not in between: no step uses the gradients",
    "zero_gradient": "the gradient is exactly zero in all steps: look for a saturated or clamped activation, or a factor of zero",
    "cancelled_bias": "the loss does not depend on this bias, which a difference or normalisation cancels: bias=False gives the same model",
    "same_units": "draw the initial weights at random: all units of the layer are the same, get the same gradient and stay the same",
    "gradients_add_up": "call optimizer.zero_grad() in each step: each update uses the gradients of all earlier steps as well",
    "nonfinite_gradient": "look for sqrt, norm or log at 0 in the forward: their gradients are infinite there",
    "batch_leak": "look at view, reshape, softmax(dim=…), mean and norm in the module: one of them works along the batch's dimension",
    "random_in_eval": "pass training=self.training to functional dropout, and draw no random numbers in evaluation mode",
    "mode_not_restored": "call model.train() after an evaluation: dropout is off and batch norm is fixed in all steps that follow",
    "evaluates_in_train_mode": "call model.eval() in evaluate, not model.train()",
    "unequal_micro_batches": "micro-batches have different numbers of targets (padding, ignore_index): give a Task weight=, their number",
    "padding_leak": "look at the attention mask, the positions and means over padded places: padding changes results",
    "batch_statistics": "look for operations along the batch in the loss (if meant, keep accumulation=1), or padding that changes results",
    "learning_rate": "Adam learns these samples with another rate: choose one with wb.find_lr",
    "maximizes": "set maximize=False: the optimizer makes the loss larger",
    "rate_too_high": "choose a lower learning rate, with wb.find_lr",
    "target_scale": "normalise the targets to a mean near 0 and a deviation near 1: weights need very many steps to grow so large",
    "does_not_overfit": "the model cannot fit a few samples: look at the loss, its targets and the shape of the outputs",
    "constant_targets": "look at what the dataset returns: all targets are the same, and there is nothing to learn",
    "targets_are_inputs": "shift the targets by one token, model(x[:, :-1]) against x[:, 1:]: the model only has to copy its input",
    "shifted_twice": "shift the targets once: models of Hugging Face shift the labels themselves, so give them labels=input_ids",
    "sees_its_targets": "use a causal mask (is_causal=True): the model reads the tokens that it is to predict",
    "labels_carry_nothing": "compare samples with their labels by eye: they are shuffled, shifted, or not those of these inputs",
    "error": "fix the error first",
}
"""Cause of a failed check → what to do."""
BRIEF_TEXT = 120
"""Most characters of a text in a brief."""
MARKS: Mapping[bool | None, str] = {True: "✓", False: "✗", None: "–"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(JsonDataclass):
    """What a check has shown."""

    name: str
    """A key of `CHECKS`."""
    passed: bool | None
    """None = not judged."""
    figure: str
    """What was measured, or why nothing was judged."""
    cause: str = ""
    """A key of `CAUSES`; "" = the check is not failed."""
    place: str = ""
    """The module or parameters at fault, as far as known."""

    @property
    def advice(self) -> str:
        """What to do; "" = nothing."""
        return CAUSES.get(self.cause, "")


def judged(figure: str, cause: str = "", place: str = "", *, sure: bool = True) -> Check:
    """What a check has shown, without its name: failed if there is a cause, and only doubtful if the cause is not `sure`."""
    return Check(name="", passed=not cause if sure or not cause else None, figure=figure, cause=cause, place=place)


@dataclass(frozen=True, slots=True, kw_only=True)
class SanityReport(JsonDataclass, display.Shown):
    """Whether a training is sound, check by check."""

    target: str
    """What was checked."""
    checks: tuple[Check, ...]
    """In the order of `CHECKS`."""
    seconds: float
    """That it took."""
    notes: tuple[str, ...] = ()
    """What the reader should know."""

    @property
    def ok(self) -> bool:
        """Whether no check has failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Check, ...]:
        """The failed checks; the first is most likely the cause of the others."""
        return tuple(check for check in self.checks if check.passed is False)

    @property
    def cause(self) -> str:
        """The cause of the first failed check, a key of `CAUSES`; "" = none has failed."""
        return self.failed[0].cause if self.failed else ""

    @property
    def verdict(self) -> str:
        """The answer in a sentence or two."""
        judged = sum(check.passed is not None for check in self.checks)
        if not self.failed:
            rest = len(self.checks) - judged
            doubts = [
                f" {check.name.capitalize()} is doubtful: {check.figure}. To do: {check.advice}." for check in self.checks if check.cause
            ]
            return f"{self.target}: nothing wrong in {judged} checks{f'; {rest} could not be judged' * bool(rest)}.{''.join(doubts)}"
        first = self.failed[0]
        place = f" in {first.place}" if first.place else ""
        return (
            f"{self.target}: {first.cause.replace('_', ' ')}{place}. {first.figure[:1].upper()}{first.figure[1:]}. To do: {first.advice}."
        )

    def brief(self) -> dict[str, Any]:
        """The report for a program or an agent, as plain JSON values that take at most BRIEF_BYTES as text.

        Returns:
            `ok`, `cause` (a key of `CAUSES`, "" = none) and `verdict`. `failed`: check, place, what was measured and what to do, the likely
            cause first. `passed` and `not_judged`: names of checks, the latter with the reason. Where all that is too long, texts are cut
            and the ends of lists left out, and `left_out` counts them.
        """
        value = {
            "target": short(self.target, BRIEF_TEXT),
            "ok": self.ok,
            "cause": self.cause,
            "verdict": short(self.verdict, 360),
            "failed": [
                {
                    "check": check.name,
                    "cause": check.cause,
                    "place": short(check.place, BRIEF_TEXT),
                    "measured": short(check.figure, BRIEF_TEXT),
                    "do": short(check.advice, BRIEF_TEXT),
                }
                for check in self.failed
            ],
            "not_judged": [[check.name, short(check.figure, BRIEF_TEXT)] for check in self.checks if check.passed is None],
            "passed": [check.name for check in self.checks if check.passed],
            "notes": [short(note, BRIEF_TEXT) for note in self.notes],
        }
        return fitted(value, "notes", "passed", "not_judged", "failed", last="failed")

    @property
    def table(self) -> display.Table:
        """A row per check, and the verdict."""
        rows = [
            (MARKS[check.passed], check.name, f"{check.place}: {check.figure}" if check.place else check.figure, check.advice)
            for check in self.checks
        ]
        note = "\n".join([self.verdict, *self.notes])
        return display.Table(columns=("", "check", "measured", "to do"), rows=rows, title="Sanity", note=note)

    def __repr__(self) -> str:
        return f"SanityReport({self.target!r}, ok={self.ok}, cause={self.cause!r})"

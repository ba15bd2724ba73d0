"""Dry runs: byte for byte what real tensors do, equal twice, and nothing in the process is changed by one."""

import contextlib
import gc
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

import workbench as wb
from workbench.core.gc import RECENT, collected_before
from workbench.harness.batches import map_tensors
from workbench.memory import api
from workbench.memory.analysis.log import MARK, MemoryLog
from workbench.memory.analysis.replay import canonical, classify
from workbench.memory.estimate import building
from workbench.memory.estimate.cuda.overrides import replaced
from workbench.memory.estimate.plan import Plan, plan_of
from workbench.memory.measure.recorder import Recorder
from workbench.train import activation_checkpointing
from workbench.train.models import Gpt, ResNet
from workbench.train.ranks import Layout, Ranks
from workbench.train.trainer import Trainer


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2, enable_nested_tensor=False)
        self.tags = nn.Linear(32, 50, bias=False)
        self.tags.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tags(self.encoder(self.words(tokens)))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.lstm = nn.LSTM(32, 48, num_layers=2, batch_first=True)
        self.out = nn.Linear(48, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.lstm(self.words(tokens))[0])


class Cut(nn.Module):
    """Leaves out what lies behind the longest text, and the head's work on what is no label."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, 32), nn.Linear(32, 50)

    def forward(self, tokens: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        longest = int(lengths.max())
        x = self.words(tokens[:, :longest]).tanh()
        inside = torch.arange(longest)[None] < lengths[:, None]
        wanted = inside & (labels[:, :longest] != -100)
        return F.cross_entropy(self.out(x[wanted]), labels[:, :longest][wanted])


def tokens(samples: int = 4, length: int = 24) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 50, (samples, length)), torch.randint(0, 50, (samples, length))


def text_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def label_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def gpt() -> nn.Module:
    return Gpt(vocabulary=50, length=32, width=32, layers=2, heads=2)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "mlp": (Mlp, (torch.randn(8, 16), torch.randint(0, 10, (8,))), label_loss),
    "gpt": (gpt, tokens(), text_loss),
    "cnn": (lambda: ResNet(classes=5, width=4), (torch.randn(4, 3, 32, 32), torch.randint(0, 5, (4,))), label_loss),
    "lstm": (Reader, tokens(), text_loss),
    "tied encoder": (Tagger, tokens(), text_loss),
    "values": (
        Cut,
        (tokens()[0], torch.tensor([3, 11, 7, 20]), torch.where(torch.arange(24) % 3 == 0, -100, tokens()[1])),
        lambda model, batch: model(*batch),
    ),
}


class RealBatches:
    """Gives real batches where a dry run gives fake ones."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def batch(self, example: Any) -> Any:
        def copy(tensor: Tensor) -> Tensor:
            with self.recorder.pause():
                made = tensor.clone()
            self.recorder.track(made, "input")
            return made

        return map_tensors(copy, example)


def real(plan: Plan) -> MemoryLog:
    """The steps of a plan on real tensors, with one rank of its own."""
    spec = plan.spec.replace(gc=False, device="cpu")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    threads = torch.get_num_threads()
    try:
        with collected_before(RECENT):
            ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"), store=HashStore())
            model, layout = plan.task.model(), Layout.of(spec, ranks)
            recorder = Recorder()
            with recorder:
                recorder.attach(model)
                trainer = Trainer(spec, plan.task, ranks, module=model, loader=api.NO_LOADER, layout=layout, alone=plan.own_loop)
                recorder.attach(trainer.module, trainer.averages)
                trainer.phase = recorder.phase
                with recorder.hooks(), replaced(activation_checkpointing, "recomputing", recorder.tracker.inside):
                    api._drive(trainer, RealBatches(recorder), plan)
                recorder.close()
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
    return recorder.log


def story(log: MemoryLog) -> list[Any]:
    """What happened, storages told by their size and what they are; those that are too small to matter are left out."""
    classify(log)
    told = []
    for event in canonical(log.events):
        if event.kind == MARK:
            told.append(log.marks[event.index])
        elif log.records[event.index].size:
            record = log.records[event.index]
            told.append((event.kind, event.size, record.category, record.module, record.op))
    return told


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        ("mlp", "sgd(momentum=0.9)"),
        ("mlp", "adamw(foreach=True)"),
        ("gpt", "adamw"),
        ("gpt", "adafactor"),
        ("cnn", "sgd(momentum=0.9, foreach=True)"),
        ("lstm", "rmsprop"),
        ("tied encoder", "adagrad"),
        ("values", "adamw"),
    ],
)
def test_a_dry_run_is_a_real_run_byte_for_byte(case: str, optimizer: str) -> None:
    make, batch, loss = CASES[case]
    plan = plan_of(make, batch, loss=loss, optimizer=optimizer, device="cpu")
    with torch.backends.mkldnn.flags(enabled=False) if case == "lstm" else contextlib.nullcontext():  # oneDNN's scratch is not known
        assert story(api.record(plan)[0]) == story(real(plan))


def test_two_runs_are_equal() -> None:
    plan = plan_of(gpt, tokens(), loss=text_loss, precision="amp_bf16")
    assert story(api.record(plan)[0]) == story(api.record(plan)[0])


@pytest.mark.parametrize(
    "knobs",
    [
        {"checkpointing": "full"},
        {"checkpointing": "selective"},
        {"precision": "amp_bf16"},
        {"precision": "amp_bf16", "checkpointing": "full"},
        {"accumulation": 3},
        {"clip_grad_norm": 1.0},
        {"precision": "amp_fp16"},
        {"ema": 0.9, "precision": "amp_bf16"},
        {"label_smoothing": 0.1, "weight_decay_on": "matrices"},
    ],
    ids=str,
)
def test_so_it_is_with_every_knob(knobs: dict[str, Any]) -> None:
    plan = plan_of(gpt, tokens(), loss=text_loss, device="cpu", **knobs)
    assert story(api.record(plan)[0]) == story(real(plan))


def test_averaged_weights_take_as_much_memory_as_the_weights() -> None:
    plain, averaged = (wb.estimate_memory(gpt, tokens(), loss=text_loss, device="cpu", **knobs) for knobs in ({}, {"ema": 0.9}))
    assert averaged.buffers - plain.buffers == averaged.parameters == plain.parameters
    assert averaged.total - plain.total == plain.parameters


@pytest.mark.parametrize("knobs", [{"parallel": "fsdp"}, {"parallel": "zero2"}, {"parallel": "fsdp", "precision": "amp_bf16"}], ids=str)
def test_where_weights_are_sharded_each_rank_averages_its_part(knobs: dict[str, Any]) -> None:
    plain, averaged, whole = (
        wb.estimate_memory(gpt, tokens(), loss=text_loss, device="H100", nproc_per_node=2, **more)
        for more in (knobs, {**knobs, "ema": 0.9}, {})
    )
    assert (
        averaged.buffers - plain.buffers == averaged.total - plain.total == pytest.approx(whole.parameters / 2, rel=0.1)
    )  # 512 bytes each


@pytest.mark.parametrize(("compression", "device"), [("fp16", "cpu"), ("bf16", "H100")])
def test_a_compressed_copy_of_each_bucket_is_predicted(compression: str, device: str) -> None:
    logs = [
        api.record(plan_of(gpt, tokens(), loss=text_loss, device=device, nproc_per_node=2, gradient_compression=name))[0]
        for name in ("none", compression)
    ]
    counts = [Counter(record.size for record in log.records if record.phase == "backward") for log in logs]
    buckets = [record.size for record in logs[1].records if record.category == "bucket"]
    assert buckets
    assert set(counts[1] - counts[0]) == {size // 2 for size in buckets}


def test_micro_steps_of_an_accumulation_do_not_add_up() -> None:
    one = wb.estimate_memory(gpt, tokens(2), loss=text_loss)
    four = wb.estimate_memory(gpt, tokens(2), loss=text_loss, accumulation=4)
    assert four.largest["activations"] == one.largest["activations"]


def test_tied_weights_count_once() -> None:
    breakdown = wb.estimate_memory(Tagger, tokens(), loss=text_loss, device="cpu")
    assert breakdown.parameters == sum(weight.nbytes for weight in Tagger().parameters())


def test_a_spec_a_task_a_function_and_a_model_can_be_estimated() -> None:
    spec = wb.RunSpec(task="text-gpt", micro_batch=8, precision="amp_bf16")
    of_spec = wb.estimate_memory(spec, device="H200")
    assert of_spec.device == "H200"
    task = wb.Task(model=gpt, dataset=lambda: [torch.zeros(24, dtype=torch.int64)] * 3, loss=lambda m, b: m(b).mean())
    of_task = wb.estimate_memory(task, micro_batch=4)
    assert of_task.inputs or of_task.largest["inputs"] == 4 * 24 * 8
    of_model = wb.estimate_memory(gpt(), tokens(), loss=text_loss)
    of_function = wb.estimate_memory(gpt, tokens(), loss=text_loss)
    assert (of_model.total, of_model.reserved, of_model.largest) == (of_function.total, of_function.reserved, of_function.largest)


def test_shapes_alone_will_do() -> None:
    shapes = map_tensors(lambda tensor: tensor.to("meta"), tokens())
    assert wb.estimate_memory(gpt, shapes, loss=text_loss).total == wb.estimate_memory(gpt, tokens(), loss=text_loss).total


def test_tokens_of_an_embedding_bag_are_no_samples() -> None:
    batch = (torch.zeros(90, dtype=torch.int64), torch.arange(0, 90, 15), torch.zeros(6, dtype=torch.int64))
    assert plan_of(lambda: nn.EmbeddingBag(50, 3), batch).spec.micro_batch == 6
    with pytest.raises(
        ValueError, match=r"micro_batch=12: the batch has 6 samples, and its first tensor more rows .* give a batch of that"
    ):
        wb.estimate_memory(lambda: nn.EmbeddingBag(50, 3), batch, micro_batch=12)


def test_other_shapes_than_those_of_the_batch() -> None:
    def peak(batch: Any, **knobs: Any) -> int:
        return wb.estimate_memory(gpt, batch, loss=text_loss, **knobs).total

    assert peak(tokens(2, 12), micro_batch=6, sequence=20) == peak(tokens(6, 20))
    make, (images, labels), loss = CASES["cnn"]
    assert (
        wb.estimate_memory(make, (images, labels), loss=loss, image=64).total
        == wb.estimate_memory(make, (torch.empty(4, 3, 64, 64), labels), loss=loss).total
    )
    with pytest.raises(ValueError, match=r"image=64: the batch \(int64 4 × 24, int64 4 × 24\) has no tensor of shape"):
        peak(tokens(), image=64)
    with pytest.raises(ValueError, match="sequence=64: the batch"):
        wb.estimate_memory(make, (images,), sequence=64)


def test_a_loss_is_found_where_none_is_given() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            return {"loss": self.layer(x).sum(), "logits": x}

    x = torch.randn(2, 4)
    for make, batch, how in (
        (Own, {"x": x}, "the one in the model's output"),
        (lambda: nn.Linear(4, 3), (x, torch.zeros(2, dtype=torch.int64)), "the cross-entropy"),
        (lambda: nn.Linear(4, 3), (x, torch.zeros(2, 3)), "the squared error"),
        (lambda: nn.Linear(4, 3), x, "the mean of the output (2, 3); loss=lambda model, batch: … gives yours"),
        (lambda: Both(), x, "the mean of the first of 2 tensors of floats in the output, a tuple: (2, 3); loss=lambda"),
        (lambda: nn.Sequential(nn.Linear(4, 1), nn.AvgPool1d(1)), x[:1], "the output itself"),
    ):
        assert any(how in note for note in wb.estimate_memory(make, batch).notes), how
    with pytest.raises(ValueError, match="has no tensor to make a loss of"):
        wb.estimate_memory(lambda: Quiet(), x)


class Both(nn.Linear):
    """Returns a tuple, and no loss."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Quiet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> str:
        return "nothing"


class Asking(nn.Module):
    """Asks for values where many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        assert torch.isfinite(y).all()
        assert (x >= 0).all()
        if y.isnan().any() or torch.logical_not(torch.isfinite(y)).any():
            raise ValueError("not a number")
        return y * y.max().item() * int(torch.tensor(3))


def test_values_that_are_asked_for_are_answered_and_it_is_said() -> None:
    breakdown = wb.estimate_memory(Asking, torch.randn(2, 4))
    assert any("asked for the value of a tensor 10 times" in note for note in breakdown.notes), breakdown.notes
    assert not any("asked" in note for note in wb.estimate_memory(gpt, tokens(), loss=text_loss, precision="amp_fp16").notes)


def test_an_fp16_step_is_taken() -> None:
    breakdown = wb.estimate_memory(gpt, tokens(), loss=text_loss, precision="amp_fp16")
    assert breakdown.optimizer_states > 1.9 * breakdown.parameters


def test_a_constructor_that_needs_values_is_built_with_them() -> None:
    class Stern(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
            self.table = torch.ones(3)

        def forward(self, x: Tensor) -> Tensor:
            assert self.rates[0] == 0
            return super().forward(x) * self.table.sum()

    assert wb.estimate_memory(Stern, torch.randn(8, 16)).parameters == wb.estimate_memory(Mlp, torch.randn(8, 16)).parameters


def test_the_users_model_is_not_touched() -> None:
    model = Tagger().eval()
    model.scale = torch.ones(3)
    before = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    model.train()
    seen: list[Any] = []
    model.register_forward_hook(lambda *args: seen.append(args))
    wb.estimate_memory(model, tokens(), loss=text_loss, checkpointing="full", precision="amp_bf16")
    after = model.state_dict(keep_vars=True)
    assert {name: id(value) for name, value in after.items()} == {name: made for name, (made, _) in before.items()}
    assert all(torch.equal(value, before[name][1]) for name, value in after.items())
    assert model.tags.weight is model.words.weight
    assert all(weight.grad is None and type(weight) is nn.Parameter for weight in model.parameters())
    assert not seen
    assert "forward" not in vars(model.encoder.layers[0])


def state() -> list[Any]:
    return [
        F.dropout,
        F.scaled_dot_product_attention,
        torch.UntypedStorage.resize_,
        DistributedDataParallel.__init__,
        nn.Module._apply,
        nn.Module.to,
        torch.get_default_device(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        gc.isenabled(),
        dist.is_initialized(),
        torch.is_autocast_enabled("cpu"),
        len(nn.modules.module._global_forward_hooks),
        len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
        [type(torch.softmax(torch.ones(2, 2, dtype=kind), -1)).__name__ for kind in (torch.float32, torch.bfloat16)],
    ]


class Failing(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise KeyError("on purpose")


@pytest.mark.parametrize("collecting", [True, False])
def test_the_process_is_left_as_it_was(collecting: bool) -> None:
    was, text, numbers = gc.isenabled(), tokens(), torch.randn(8, 16)
    try:
        gc.enable() if collecting else gc.disable()
        before = state()
        wb.estimate_memory(gpt, text, loss=text_loss, precision="amp_bf16", world_size=4, parallel="zero1")
        assert state() == before
        with pytest.raises(ValueError, match="on purpose"):
            wb.estimate_memory(Failing, numbers, precision="amp_bf16", world_size=2, parallel="fsdp")
        assert state() == before
    finally:
        gc.enable() if was else gc.disable()


def test_what_else_lives_in_the_process_costs_nothing_and_nothing_is_left() -> None:
    """A full run of the collector goes over all objects of the process, which took longer than the estimate itself."""
    text, full = tokens(), list[int]()

    def seen(phase: str, about: dict[str, int]) -> None:
        if phase == "start" and about["generation"] == 2:
            full.append(1)

    def estimated() -> int:
        wb.estimate_memory(gpt, text, loss=text_loss, world_size=4, parallel="zero1")
        return sum(issubclass(type(one), Trainer | Recorder | nn.Module) for one in gc.get_objects())

    estimated()
    gc.disable()  # or it runs by itself in between
    gc.callbacks.append(seen)
    try:
        assert estimated() == estimated()
    finally:
        gc.callbacks.remove(seen)
        gc.enable()
    assert not full


def test_another_default_device_does_not_matter() -> None:
    torch.set_default_device("meta")
    try:
        assert wb.estimate_memory(gpt, (torch.zeros(4, 24, dtype=torch.int64),) * 2, loss=text_loss).total
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)


def test_the_default_device_of_an_older_torch_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch 2.6 the question fails after `set_default_device(None)`."""
    monkeypatch.delattr(torch, "get_default_device")
    assert wb.estimate_memory(gpt, (torch.zeros(4, 24, dtype=torch.int64),) * 2, loss=text_loss).total


def test_a_model_that_is_copied_shares_its_tensors() -> None:
    model = Tagger()
    twin = building.copied(model)
    assert twin is not model
    assert twin.encoder is not model.encoder
    assert [id(weight) for weight in twin.parameters()] == [id(weight) for weight in model.parameters()]


def test_a_run_in_tf32_is_estimated_as_another() -> None:
    spec = wb.RunSpec(task="text-gpt", micro_batch=2)
    assert wb.estimate_memory(spec.replace(tf32=True)).total == wb.estimate_memory(spec).total


def test_one_launched_rank_is_in_ddp_and_it_is_said() -> None:
    """A launched run wraps the model on one rank, too; a user's own loop does not."""
    task = wb.Task(model=lambda: nn.Linear(64, 64), dataset=list, loss=lambda model, batch: model(batch).square().mean())
    launched = wb.estimate_memory(task, torch.zeros(4, 64), device="H100")
    own = wb.estimate_memory(lambda: nn.Linear(64, 64), torch.zeros(4, 64), loss=task.loss, device="H100")
    assert "DDP, 1 rank" in launched.title
    assert "DDP" not in own.title
    [said] = [note for note in launched.notes if "DDP's buckets" in note]
    assert "16.2 KiB" in said
    assert not any("DDP's buckets" in note for note in own.notes)
    assert launched.largest["gradients"] == 2 * own.largest["gradients"]


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (
            "A100",
            ['"A100" alone means A100-40GB; of another size: A100-80GB, A100-PCIe-80GB', "37.3 GiB of A100-40GB are its datasheet's 40 GB"],
        ),
        ("A100-40GB", ["37.3 GiB of A100-40GB are its datasheet's 40 GB"]),
        ("RTX-4090", []),
    ],
)
def test_an_estimate_says_which_card_a_short_name_means_and_whose_bytes_it_counts(device: str, said: list[str]) -> None:
    notes = wb.estimate_memory(torch.nn.Linear(8, 8), torch.zeros(2, 8), device=device).notes
    told = [note for note in notes if "A100" in note or "datasheet" in note]
    assert len(told) == len(said)
    assert all(any(text in note for note in told) for text in said)

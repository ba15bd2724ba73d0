"""What the fullest moment is made of: groups that add up, who holds them, what it says of itself, whether it fits, and differences."""

import json
from dataclasses import replace
from typing import Any

import pytest

import workbench as wb
from tests.memory_logs import Writer, training
from workbench.core import units
from workbench.core.device import MARGIN, Device
from workbench.core.vocabulary import GROUPS
from workbench.memory.analysis.breakdown import ONE_STEP, MemoryBreakdown
from workbench.memory.analysis.fit import Fit
from workbench.memory.analysis.non_pytorch import CONTEXT, NCCL, NonPyTorchMemory

GIB = 2**30
BATCH = 4096


def breakdown(batch: int = BATCH, **fields: Any) -> MemoryBreakdown:
    log = training(batch, **{k: fields.pop(k) for k in ("steps", "micros", "checkpointed") if k in fields})
    return MemoryBreakdown.from_log(log, **{"kind": "predicted", "title": "three layers, Adam", **fields})


def test_it_is_public() -> None:
    assert wb.MemoryBreakdown is MemoryBreakdown


def test_groups_and_holders_add_up_to_what_is_allocated() -> None:
    for found in (breakdown(), breakdown(device="H200"), breakdown(kind="measured", scratch=12345)):
        assert found.total == found.allocated == sum(getattr(found, group) for group in GROUPS)
        assert sum(holder.bytes for holder in found.holders) == found.total
        for group in GROUPS:
            assert sum(h.bytes for h in found.holders if h.group == group) == getattr(found, group) <= found.largest[group]
        assert [h.bytes for h in found.holders] == sorted((h.bytes for h in found.holders), reverse=True)
        assert sum(row.bytes for row in found.by_module()) == sum(row.bytes for row in found.by_operator()) == found.total


def test_by_hand_on_a_cpu() -> None:
    width, act = 256, 4 * BATCH * 256
    found = breakdown()
    weights = 3 * 4 * width * width
    assert found.parameters == weights
    assert found.optimizer_states == 2 * weights
    assert found.inputs == act
    assert found.reserved is found.outside is found.device_used is None
    assert found.first_step == found.total - 2 * weights
    assert found.steady == found.total == max(found.phases.values())
    assert list(found.phases) == ["init", "data", "forward", "backward", "between", "optimizer", "end"]


@pytest.mark.parametrize(
    ("moment", "gradients", "shown"),
    [
        ("start of backward, step 2: log_softmax of the loss", 0, "0 B, none yet"),
        ("middle of forward of micro-step 1 of 2, step 2: mm", 0, "0 B, none yet"),
        ("middle of the optimizer step, step 2: foreach", 0, "0 B"),
        ("end of backward, step 2: mm", 2048, "2.00 KiB"),
    ],
)
def test_gradients_that_are_not_there_at_the_peak_say_why(moment: str, gradients: int, shown: str) -> None:
    found = replace(breakdown(), peak_moment=moment, gradients=gradients)
    row = {row[0]: row for row in found.table.rows}["gradients"]
    assert row[1] == shown
    assert row[3] == units.bytes_(found.largest["gradients"])
    none = replace(found, largest={**found.largest, "gradients": 0}, gradients=0)
    assert {row[0]: row for row in none.table.rows}["gradients"][1] == "0 B", "a step without a backward has none at all"


def test_on_a_gpu_there_is_rounding_a_reserve_and_something_outside() -> None:
    cpu, gpu = breakdown(), breakdown(device="cuda")
    assert gpu.reserved is not None
    assert cpu.total <= gpu.total <= gpu.reserved
    assert gpu.outside == CONTEXT
    assert gpu.device_used == gpu.reserved + CONTEXT.mid
    assert breakdown(device="cuda", world_size=2).outside == CONTEXT + NCCL


def test_blocks_that_are_not_split_count_as_allocated() -> None:
    w = Writer()
    w.mark("forward")
    w.alloc(11 * 2**20, "aten.mm.default")
    found = MemoryBreakdown.from_log(w.log, kind="predicted", title="", device="cuda")
    assert found.total == found.reserved == 12 * 2**20
    assert found.other == 2**20
    assert found.by_operator()["unsplit"].bytes == 2**20


def test_measured_values_are_kept() -> None:
    own = NonPyTorchMemory(low=1, mid=2, high=3, source="nvidia-smi")
    found = breakdown(kind="measured", device="H200", reserved=7 * GIB, outside=own, retries=2, rank=1, world_size=4)
    assert (found.reserved, found.outside, found.retries, found.device_used) == (7 * GIB, own, 2, 7 * GIB + 2)
    assert "measured for H200 of rank 1 of 4" in found.caption
    assert "gave its cache back 2 times" in found.caption
    assert breakdown(kind="measured", device="H200").reserved is None


def test_scratch_counts_as_temporary() -> None:
    with_, without = breakdown(scratch=1000, kind="measured"), breakdown(kind="measured")
    assert with_.temporaries - without.temporaries == with_.total - without.total == 1000
    assert with_.steady == with_.total
    assert (with_ - without)["temporaries"] == 1000


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "guessed"}, "kind='guessed': a breakdown is 'predicted' or 'measured'"),
        ({"scratch": -1}, "scratch=-1: bytes of the measured peak above the log's"),
    ],
)
def test_what_cannot_be(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        breakdown(**fields)


def test_the_moment_names_what_is_large_then() -> None:
    w = Writer()
    w.alloc(10**6, category="parameter")
    w.mark("forward", 1, 1)
    w.alloc(10**5, "aten._log_softmax.default")
    w.mark("backward")
    grad = w.alloc(2 * 10**5, "aten._log_softmax_backward_data.default")
    w.free(grad)
    for _ in range(30):
        w.free(w.alloc(8, "aten.mm.default"))
    found = MemoryBreakdown.from_log(w.log, kind="predicted", title="")
    assert found.peak_moment == "start of backward, step 2: gradient of log_softmax of the loss"


@pytest.mark.parametrize(
    ("op", "module", "category", "words"),
    [
        ("aten.gelu.default", "blocks.3.mlp", None, "gelu in blocks.3.mlp (GELU)"),
        ("aten.gelu.default", "", None, "gelu in forward"),
        ("aten.empty.memory_format", "head", "parameter", "parameters of head"),
        ("aten.zeros_like.default", "", "optimizer_state", "optimizer states"),
        ("", "", "input", "the batch"),
        ("", "", "other", "tensors made by no operator in forward"),
    ],
)
def test_holders_in_words(op: str, module: str, category: str | None, words: str) -> None:
    w = Writer()
    w.log.modules = {"blocks.3.mlp": "GELU"}
    w.mark("forward")
    w.alloc(5, op, module, category)
    assert MemoryBreakdown.from_log(w.log, kind="measured", title="").holders[0].words == words


def test_recomputed_activations_stand_apart() -> None:
    holders = breakdown(checkpointed=True).holders
    again = [h for h in holders if h.recomputed]
    assert {h.group for h in again} == {"activations"}
    assert all(h.words.endswith(", recomputed") for h in again)


def test_by_module_takes_as_many_names_as_asked() -> None:
    found = breakdown()
    assert {row.name for row in found.by_module()} == {"layers.0", "layers.1", "layers.2", "outside any module"}
    by_child = found.by_module(1)
    assert {row.name for row in by_child} == {"layers", "outside any module"}
    assert by_child["layers"].held["parameters"] == found.parameters
    assert sum(row.bytes for row in found.by_module(group="activations")) == found.activations
    assert len(by_child.to_frame()) == len(by_child) == 2
    with pytest.raises(KeyError, match="no module 'layer': there are"):
        by_child["layer"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"depth": 0}, "depth=0: how many names of a module's path"),
        ({"group": "weights"}, "no group 'weights': memory is held as parameters, "),
    ],
)
def test_by_module_of_nothing(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        breakdown().by_module(**fields)


def test_a_table_of_many_modules_has_a_row_for_the_rest() -> None:
    w = Writer()
    w.mark("forward")
    for i in range(25):
        w.alloc(1000 + i, "aten.mm.default", f"m{i}")
    table = MemoryBreakdown.from_log(w.log, kind="measured", title="many").by_module().table
    assert len(table.rows) == 21
    assert table.rows[-1][0] == "5 others"


def test_phases_have_the_peak_of_each() -> None:
    found = breakdown()
    points = list(zip(found.timeline.phase, found.timeline.total, strict=True))
    assert {phase: max(total for when, total in points if when == phase) for phase in found.phases} == found.phases


def test_text_html_frame_and_json_say_the_same() -> None:
    found = breakdown(device="H200", world_size=8)
    text, html, frame = str(found), found._repr_html_(), found.to_frame()
    for face in (text, html):
        for word in ("optimizer states", "allocated", "reserved", "outside", "device used", "predicted for H200 of rank 0 of 8", "step 2"):
            assert word in face
    shares = {str(row[0]): row[2] for row in found.table.rows}
    assert [shares[name] for name in ("allocated", "reserved", "outside", "device used")] == ["100 %", "–", "–", "–"]
    assert list(frame["memory"]) == [*GROUPS, "allocated", "reserved", "outside", "device_used"]
    assert frame["at_peak"].iloc[8] == found.total
    assert MemoryBreakdown.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert MemoryBreakdown.from_json(json.loads(json.dumps(breakdown().to_json()))) == breakdown()
    assert repr(found).startswith("MemoryBreakdown(predicted, ")


def test_one_step_says_so() -> None:
    found = breakdown(steps=1)
    assert found.steady == found.first_step
    assert ONE_STEP in found.notes
    assert ONE_STEP not in breakdown().notes


def test_notes_of_the_log_come_first_and_once() -> None:
    log = training(2)
    log.notes = ["answered .item() 3 times"]
    found = MemoryBreakdown.from_log(log, kind="predicted", title="", notes=("eager only", "answered .item() 3 times"))
    assert found.notes == ("answered .item() 3 times", "eager only")


# --- fits


def test_it_fits_or_says_what_is_missing() -> None:
    found = breakdown()
    yes, no = found.fits(found.total, margin=0), found.fits(found.total - 1, margin=0)
    assert yes
    assert (yes.spare, no.spare) == (0, -1)
    assert not no
    assert yes.certain
    assert yes.words.startswith("fits: ")
    assert str(no).startswith("does not fit: ")
    assert no.words.endswith(f"1 B more than the {units.bytes_(found.total - 1)} that may be used")
    assert not found.fits(found.total)  # all answers leave as much free


def test_a_device_by_name_or_as_such() -> None:
    found = breakdown(device="cuda")
    fit = found.fits("H200")
    assert fit
    assert fit.capacity == Device.named("H200").memory
    assert fit.needed == found.device_used
    assert (fit.low, fit.high) == ((found.reserved or 0) + CONTEXT.low, (found.reserved or 0) + CONTEXT.high)
    assert found.fits(Device.named("H200")) == fit
    assert fit.margin == MARGIN
    assert fit.words.endswith("to spare of the 125 GiB that may be used (5.0 % stays free)")
    assert "118 GiB that may be used (10 % stays free)" in found.fits("H200", 0.1).words
    assert fit.words.partition(":")[0] in fit._repr_html_()
    assert fit.to_frame()["spare"].iloc[0] == fit.spare


def test_between_the_least_and_the_most_it_is_not_certain() -> None:
    fit = Fit(device="", capacity=100, needed=90, low=80, high=110)
    assert fit
    assert not fit.certain
    assert "not certain" in fit.words


@pytest.mark.parametrize("margin", [-0.1, 1, 10])
def test_a_margin_is_a_fraction(margin: float) -> None:
    with pytest.raises(ValueError, match=r"margin=.*: a fraction of the device's memory that is to stay free"):
        breakdown().fits(GIB, margin)


def test_what_a_cpu_holds_says_nothing_of_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"this is memory as a CPU holds it .*wb\.estimate_memory\(…, device='H200'\)"):
        breakdown().fits("H200")
    with pytest.raises(ValueError, match="unknown device 'H2000'"):
        breakdown(device="cuda").fits("H2000")


# --- differences


def test_a_difference_says_which_is_which() -> None:
    predicted, measured = breakdown(), breakdown(BATCH // 2, kind="measured")
    off = predicted - measured
    assert off.total == predicted.total - measured.total == sum(off[group] for group in GROUPS)
    assert off.error == pytest.approx(off.total / measured.total)
    assert list(off.table.columns[1:3]) == ["predicted", "measured"]
    assert off.table.title == "predicted less measured"
    assert (predicted - predicted).names == ("predicted, this", "predicted, other")
    assert len(off.to_frame()) == len(GROUPS) + 1
    assert "activations" in str(off)
    assert "<td" in off._repr_html_()
    assert repr(off).startswith("MemoryDifference(+")


def test_a_difference_of_what_one_side_lacks() -> None:
    off = breakdown(device="cuda") - breakdown()
    with pytest.raises(KeyError, match="'reserved' is not known on both sides"):
        off["reserved"]
    with pytest.raises(KeyError, match="no 'weights' in a difference: there are parameters"):
        off["weights"]
    with pytest.raises(TypeError):
        breakdown() - 5  # type: ignore[operator]

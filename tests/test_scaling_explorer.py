"""The scaling explorer without a browser: what its slider stands for, what it shows, and that it follows at once."""

import re
import statistics
import time
from typing import Any

import pytest

import workbench as wb
from workbench.cost import Cluster, Link, Transformer
from workbench.planning import PlanError
from workbench.scaling import ScalingCurve
from workbench.scaling.point import CurveError
from workbench.widgets import ScalingExplorer
from workbench.widgets import scaling_explorer_faces as drawn
from workbench.widgets.scaling_explorer_model import MOST, Place, clusters, places_of, words

CURVE = ScalingCurve([(8, 8 * 40150), (16, 16 * 37610), (16, 16 * 37810), (32, 32 * 35370)])
GPT = Transformer(layers=80, hidden=8192, vocabulary=32_000, sequence=2048)


def turned(target: Any, gpus: int, **options: Any) -> ScalingExplorer:
    made = ScalingExplorer(target, **options)
    made.gpus.value = gpus
    return made


def test_a_curve_is_shown_as_its_fit_says() -> None:
    made = turned(CURVE, 128, price=2.0, intensity=300, samples=1e9)
    told = CURVE.fit().predict(128)
    place = made.place
    assert (place.low, place.mid, place.high, place.naive) == pytest.approx((told.low, told.mid, told.high, told.naive))
    assert place.money(1e9, 2.0) == pytest.approx(128 * 1e9 / told.mid / 3600 * 2)
    assert place.kwh(1e9) == pytest.approx(128 * 700 * 1e9 / told.mid / 3.6e6)  # an H100 at its design power
    assert [size for _, size in made.gpus.options] == [8 * 2**power for power in range(11)] + [MOST]
    assert "128" in made.figures.value
    assert "estimated by design power" in made.figures.value


def test_plans_are_shown_as_their_front() -> None:
    plans = wb.plan(GPT, "DGX-A100", global_batch=2048)
    made = turned(plans, 256)
    (front,) = [one for one in plans.front if one.gpus == 256]
    assert made.place.mid == pytest.approx(2048 / front.seconds.mid)
    assert (made.place.low, made.place.high) == pytest.approx((2048 / front.seconds.high, 2048 / front.seconds.low))
    assert (made.place.bound, made.place.layout) == (front.bound, front.layout)
    assert made.place.naive == pytest.approx(2048 / plans.front[0].seconds.mid / plans.front[0].gpus * 256)
    assert made.cluster.disabled
    assert "DGX-A100" in made.title
    assert places_of(plans)[256] == made.place


def test_another_cluster_is_planned_anew_and_a_bad_one_says_why() -> None:
    made = turned(GPT, 1024, global_batch=2048)
    before = made.place
    made.cluster.value = "DGX-B200"
    assert made.gpus.value == 1024
    assert made.place.mid > before.mid
    assert "DGX-B200" in made.head.value
    small = Cluster(
        name="small",
        device=wb.Device.named("T4"),
        gpus_per_node=2,
        intra=Link(latency=1e-5, bandwidth=1e10),
        inter=Link(latency=1e-4, bandwidth=1e9),
        source="made up",
    )
    assert next(iter(clusters(small))) == "small (own)"
    refused = ScalingExplorer(GPT, global_batch=2048)
    refused._known["small"] = small
    refused.cluster.options = [*refused.cluster.options, "small"]
    refused.cluster.value = "small"
    assert "datasheet has fp16, fp32 only" in refused.light.value


def test_what_limits_is_said_in_words_everywhere() -> None:
    made = ScalingExplorer(GPT, global_batch=512)
    seen = set()
    for _, size in made.gpus.options:
        made.gpus.value = size
        assert made.place.bound in made.light.value
        seen.add(made.place.bound)
    assert "compute" in seen
    assert len(seen) > 1
    assert all(bound in made.limits.value for bound in seen)


def test_the_picture_has_words_the_band_and_no_colour_alone() -> None:
    made = turned(CURVE, 64)
    assert re.search(r'aria-label="throughput against GPUs; 64 GPUs: [^"]+ of the naive line"', made.curve.value)
    assert made.curve.value.count("<circle") == 4  # three sizes that were measured, and the slider
    assert "stroke-dasharray" in made.curve.value
    assert words(made.place) in made.curve.value


def test_the_static_face_needs_no_kernel() -> None:
    face = turned(CURVE, 64)._repr_mimebundle_()
    assert {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"} <= set(face)
    assert "<table>" in face["text/html"]
    assert "<svg" in face["text/html"]
    assert 'class="wb-panel"' not in face["text/html"]
    assert face["text/plain"].startswith("ScalingExplorer(")


def test_one_place_alone_is_drawn() -> None:
    place = Place(gpus=8, low=1.0, mid=1.0, high=1.0, naive=1.0, bound="")
    assert "<svg" in drawn.picture([place], [], place)
    assert "not known" in drawn.light(place)
    assert drawn.table([place]).rows[-1][-1] == "–"


def test_it_follows_a_slider() -> None:
    """A redraw takes some 20 ms; a tenth of a second would be felt, and a loaded machine is given more."""
    made = ScalingExplorer(CURVE)
    taken = []
    for _, size in [*made.gpus.options] * 2:
        began = time.perf_counter()
        made.gpus.value = size
        taken.append(time.perf_counter() - began)
    assert statistics.median(taken) < 1.0


@pytest.mark.parametrize(
    ("target", "options", "error", "said"),
    [
        (3, {}, PlanError, "a ScalingCurve or its fit, Plans, or a cost.Transformer"),
        (GPT, {}, PlanError, "global_batch is wanted"),
        (CURVE, {"samples": 0}, PlanError, "a number above 0"),
        (CURVE, {"cluster": "DGX-1"}, ValueError, "unknown cluster"),
        (ScalingCurve([(8, 1.0)]), {}, CurveError, "one point"),
    ],
)
def test_what_is_refused(target: Any, options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ScalingExplorer(target, **options)

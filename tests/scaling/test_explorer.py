"""The scaling explorer without a browser: what its slider stands for, what it shows, and that it follows at once."""

import re
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("ipywidgets", reason="panels need Jupyter's packages (pip install '.[notebooks]')")

import workbench as wb
from tests.hostile import CONTROLS, EVIL, assert_is_text, harmful
from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.collective_cost import Link
from workbench.cluster.analysis.plan.plans import BOUNDS
from workbench.cluster.analysis.plan.ranges import PlanError
from workbench.cluster.analysis.transformer import Transformer
from workbench.core import units
from workbench.scaling.analysis.curve.curve import ScalingCurve
from workbench.scaling.analysis.curve.point import CurveError
from workbench.scaling.panel import html as drawn
from workbench.scaling.panel.explorer import ScalingExplorer
from workbench.scaling.panel.model import MAX_GPUS, Curve, Place, clusters, places_of, words

CURVE = ScalingCurve([(8, 8 * 40150), (16, 16 * 37610), (16, 16 * 37810), (32, 32 * 35370)])
GPT = Transformer(layers=80, hidden=8192, vocabulary=32_000, sequence=2048)


def turned(target: Any, gpus: int, **options: Any) -> ScalingExplorer:
    made = ScalingExplorer(target, **options)
    made.gpus.value = gpus
    return made


def test_a_curve_is_shown_as_its_fit_says() -> None:
    made = turned(CURVE, 128, cluster="DGX-H100", price=2.0, intensity=300, samples=1e9)
    told = CURVE.fit().predict(128)
    place = made.place
    assert (place.low, place.mid, place.high, place.naive) == pytest.approx((told.low, told.mid, told.high, told.naive))
    assert place.money(1e9, 2.0) == pytest.approx(128 * 1e9 / told.mid / 3600 * 2)
    assert place.kwh(1e9) == pytest.approx(128 * 700 * 1e9 / told.mid / 3.6e6)  # an H100 at its design power
    assert [size for _, size in made.gpus.options] == [8 * 2**power for power in range(11)] + [MAX_GPUS]
    assert "128" in made.figures.value
    assert "estimated by design power of H100-SXM (DGX-H100)" in made._repr_mimebundle_()["text/html"]


def test_a_curve_is_of_any_device_until_one_is_named() -> None:
    made = turned(CURVE, 128, price=2.0, intensity=300)
    assert (made.place.watts, made.place.kwh(1e6)) == (None, None)
    face = made._repr_mimebundle_()["text/html"]
    assert "money" in face
    assert not re.search("energy|carbon|H100|GPU", face)
    assert "128 processes: " in face
    assert "samples per second against processes" in made.curve.value
    assert "process hours" in made.figures.value
    assert "at 2 per process and hour" in made.figures.value
    assert made.gpus.description == "processes"
    made.cluster.value = "DGX-A100"
    assert made.gpus.value == 128
    assert "design power of A100-80GB (DGX-A100)" in made.figures.value
    assert made.gpus.description == "GPUs"
    assert "GPU hours" in made.figures.value
    made.cluster.value = "not said"
    assert "design power" not in made.figures.value
    assert made.gpus.description == "processes"


@pytest.mark.parametrize("lost", [0.05, 0.6])
def test_a_curve_says_its_efficiency_and_not_what_computes(lost: float) -> None:
    made = turned(ScalingCurve([(1, 100.0), (2, 200 * (1 - lost)), (4, 400 * (1 - lost) ** 2)]), 4)
    told = made.light.value
    share = made._sources["not said"].fit.predict(4).efficiency  # type: ignore[attr-defined]
    assert f"efficiency of {units.percent(share)}" in told
    assert ("lost in scaling</span>" in told) == (share < 0.5) == ("the larger part" in told)
    assert not re.search("comput|communication|GPU", told)


def test_what_is_said_of_a_plan_holds() -> None:
    model = Transformer(layers=24, hidden=2304, vocabulary=50304, sequence=1024, heads=18)
    seen = [plan for gpus in (64, 512) for plan in wb.plan(model, "DGX-H100", gpus=gpus, global_batch=512) if plan.bound == "compute"]
    assert seen
    assert all(plan.parts["compute"] == max(plan.parts.values()) for plan in seen)
    assert BOUNDS["compute"].startswith("computing is the largest part")


def test_the_slider_goes_beyond_what_was_measured() -> None:
    made = ScalingExplorer(ScalingCurve([(16_000, 100.0), (32_000, 190.0)]))
    assert [size for _, size in made.gpus.options] == [16_000, 32_000, 64_000, 128_000]
    assert ScalingExplorer(ScalingCurve([(9_999, 100.0), (20_000, 190.0)])).gpus.options[-1][1] == 80_000


def test_plans_are_shown_as_their_front() -> None:
    plans = wb.plan(GPT, "DGX-A100", global_batch=2048)
    made = turned(plans, 256)
    (front,) = [one for one in plans.front if one.gpus == 256]
    assert made.place.mid == pytest.approx(2048 / front.seconds.mid)
    assert (made.place.low, made.place.high) == pytest.approx((2048 / front.seconds.high, 2048 / front.seconds.low))
    assert (made.place.bound, made.place.layout) == (front.bound, front.layout + ", memory tight" * front.tight)
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
    assert re.search(r'aria-label="throughput against processes; 64 processes: [^"]+ of the naive line"', made.curve.value)
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


def test_to_follow_a_slider_it_fits_nothing_and_asks_for_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ScalingExplorer(CURVE)
    asked: list[int] = []
    of_many = Curve.all
    monkeypatch.setattr(Curve, "all", lambda self, sizes: asked.append(len(sizes)) or of_many(self, sizes))
    monkeypatch.setattr(ScalingCurve, "fit", None)
    for _, size in made.gpus.options:
        made.gpus.value = size
    assert set(asked) == {1}
    assert len(asked) <= len(made.gpus.options)


@pytest.mark.parametrize(
    ("target", "options", "error", "said"),
    [
        (3, {}, PlanError, "a ScalingCurve or its fit, Plans, or a Transformer"),
        (GPT, {}, PlanError, "global_batch is needed"),
        (CURVE, {"samples": 0}, PlanError, "a number above 0"),
        (CURVE, {"samples": "2"}, PlanError, "samples='2': a number above 0"),
        (CURVE, {"price": "2"}, PlanError, "price='2': a number of at least 0 is allowed: money per GPU and hour"),
        (CURVE, {"price": -2}, PlanError, "price=-2"),
        (CURVE, {"intensity": float("nan")}, PlanError, "intensity=nan: a number of at least 0"),
        (
            CURVE,
            {"intensty": 3},
            PlanError,
            "no option 'intensty': did you mean 'intensity'.*For a ScalingCurve there are cluster, samples, ",
        ),
        (CURVE, {"tensor": 8}, PlanError, "no option 'tensor'"),
        (CURVE, {"global_batch": 5}, PlanError, "global_batch=5: known for a model"),
        (GPT, {"global_batch": 64, "tensr": 2}, PlanError, "did you mean 'tensor'"),
        (CURVE, {"cluster": "DGX-1"}, ValueError, "unknown cluster"),
        (ScalingCurve([(8, 1.0)]), {}, CurveError, "one point"),
    ],
)
def test_what_is_refused(target: Any, options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ScalingExplorer(target, **options)


def test_names_of_clusters_and_layouts_are_text_and_no_html() -> None:
    odd = EVIL + CONTROLS
    real = Cluster.named("DGX-H100")
    cluster = replace(real, name=odd, source=odd, device=replace(real.device, name=odd, source=odd))
    assert harmful(turned(CURVE, 128, cluster=cluster, price=2.0, intensity=300)._repr_mimebundle_()["text/html"]) == []
    made = turned(GPT, 64, cluster=cluster, global_batch=512)
    parts = (made.head, made.light, made.figures, made.curve, made.limits)
    assert_is_text(made._repr_mimebundle_()["text/html"], "".join(part.value for part in parts))
    place = replace(made.place, layout=odd)
    assert_is_text(drawn.light(place), drawn.static(odd, place, [place, place], "", odd), drawn.head(odd))


def test_what_a_cluster_without_a_plan_says_is_text_and_no_html(monkeypatch: pytest.MonkeyPatch) -> None:
    made = turned(GPT, 64, global_batch=512)

    def refuse(*_: object) -> None:
        raise PlanError(EVIL + CONTROLS)

    monkeypatch.setattr(made, "_source", refuse)
    made.cluster.value = "DGX-A100"
    assert_is_text(made.light.value)


def test_notes_and_names_of_a_curve_are_text_and_no_html() -> None:
    odd = EVIL + CONTROLS
    curve = ScalingCurve([(8, 8 * 40150), (16, 16 * 37610)], notes=(odd,))
    assert_is_text(curve._repr_html_())
    made = turned(ScalingCurve([(8, 8 * 40150), (16, 16 * 37610), (32, 32 * 35370)], notes=(odd,)), 128)
    assert harmful(made._repr_mimebundle_()["text/html"]) == []

"""compare_formats: what is measured and recommended, on real files; and what it makes of the diagnosis's remedies, on figures by hand."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import workbench as wb
from tests.data.formats import s3_beside
from tests.data.test_conversion import pictures
from tests.drawn import comparison
from tests.made import World
from tests.slow_loader import diagnosis
from workbench.data.analysis.format_costs import ALIKE, AS_IT_IS, PREPARED, FormatComparison
from workbench.data.conversion import encoded
from workbench.data.data_card import decode_picture
from workbench.diagnosis.analysis.diagnosis import Diagnosis


def test_formats_are_compared_on_the_users_samples(tmp_path: Path) -> None:
    wb.data.write_shards(pictures(40), tmp_path / "now", format="folder", quiet=True)
    found = wb.data.compare_formats(tmp_path / "now", ["tar", "npy"], rounds=1, folder=tmp_path, quiet=True)
    assert [stored.format for stored in found.formats] == [AS_IT_IS, "tar", "npy", PREPARED]
    ways = {(r.format, r.order, r.cache) for r in found.readings}
    assert ways == {
        (name, order, cache)
        for name in (AS_IT_IS, "tar", "npy", PREPARED)
        for order in ("random", "sequential")
        for cache in ("cold", "warm")
    }
    assert all(reading.seconds > 0 for reading in found.readings)
    assert found.decode_cpu > 0
    assert found.best in ("tar", "npy")
    assert found.best in found.recommendation
    assert found.left_of_cpu() is not None
    assert FormatComparison.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert len(found.to_frame()) == 16
    assert "recommended" in str(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["now"]
    with pytest.raises(ValueError, match="order='any'"):
        wb.data.compare_formats(tmp_path / "now", order="any")


def test_read_amplification_is_measured_and_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    found = wb.data.compare_formats(pictures(60), ["parquet-untuned"], rounds=1, folder=tmp_path, quiet=True)
    assert found.stored("parquet-untuned").rows_read_for_one == 60
    assert "read amplification 60" in found.warnings[0]


def test_the_recommendation_is_the_fastest_or_one_about_as_fast_without_a_package() -> None:
    alike = comparison({"lmdb": 1.0, "tar": 1.1, "npy": 3.0})
    assert alike.best == "tar"
    assert "about as long as the fastest (lmdb" in alike.recommendation
    assert "needs no package" in alike.recommendation
    assert comparison({"lmdb": 1.0, "tar": 1.3}).best == "lmdb"
    assert alike.speedup == pytest.approx(10 / 1.1)


def test_the_gain_of_prepared_data_follows_from_the_measured_format() -> None:
    """A loader of 30 ms of CPU per batch; decoded pictures leave a quarter of it, instead of nothing as in the ceiling."""
    plain = diagnosis()
    assert plain.remedy("prepared data").ceiling
    measured = plain.with_formats(comparison({"tar": 1.0, PREPARED: 1.0}, decode=1.0))
    remedy = measured.remedy("prepared data")
    assert not remedy.ceiling
    assert "as measured in the format decoded" in remedy.formula
    assert "75 % of the dataset's CPU" in remedy.formula
    assert 1 < remedy.speedup < plain.remedy("prepared data").speedup
    assert remedy.low < remedy.speedup < remedy.high
    assert Diagnosis.from_json(json.loads(json.dumps(measured.to_json()))).remedy("prepared data").formula == remedy.formula


def test_what_is_left_of_waiting_is_that_of_the_best_local_format() -> None:
    assert comparison({"tar": 1.0}).left_of_waiting() == pytest.approx(0.5 / 9)
    assert comparison({"tar": 40.0}).left_of_waiting() == 1.0
    assert comparison({"tar": 1.0}).left_of_cpu() is None
    assert comparison({"tar": 1.0}).left_of_reading() == pytest.approx(0.5)
    alike = comparison({"lmdb": 1.0, "tar": 1.1, PREPARED: 0.1})
    assert alike.left_of_waiting() == pytest.approx(
        0.55 / 9
    )  # of the format that the remedy names, and neither of the fastest nor of pictures


def test_the_gain_of_faster_storage_follows_from_the_measured_copy() -> None:
    """A loader that waits 30 ms per batch and computes 10 ms: the copy leaves an 18th of the waiting, and less of the CPU."""
    slow = Diagnosis.of(World(cpu=0.01, blocked=0.03).evidence())
    assert slow.cause.startswith("storage")
    assert slow.remedy("faster storage").ceiling
    remedy = slow.with_formats(comparison({"tar": 1.0})).remedy("faster storage")
    assert not remedy.ceiling
    assert "as measured in the format tar" in remedy.formula
    assert "94 % of the waiting for storage, and" in remedy.formula
    assert remedy.low < remedy.speedup < remedy.high
    assert "at once" not in remedy.formula
    others = dataclasses.replace(comparison({"tar": 1.0}), batch_size=8)
    assert (
        "with 8 samples read at once (the loader reads 32: give batch_size=)" in slow.with_formats(others).remedy("faster storage").formula
    )
    assert slow.with_formats(comparison({"tar": 2.0})).remedy("faster storage").speedup < remedy.speedup


def test_how_much_of_a_loaders_cpu_is_reading_follows_from_the_transformation_or_stays_open() -> None:
    """Reading took 1 ms of CPU per sample where formats were compared; the dataset takes 100 ms for a batch of 32."""
    found = comparison({"tar": 1.0})
    assert found.reading_cpu(0.1, 32) == pytest.approx((0.032, 0.1))
    assert found.reading_cpu(0.02, 32) == pytest.approx((0.02, 0.02))  # never more than all
    assert found.reading_cpu(0.1, None) == pytest.approx((0.0, 0.1))
    known = dataclasses.replace(found, transform_cpu=3e-3)
    assert known.reading_cpu(0.1, 32) == pytest.approx((0.025, 0.025))  # a quarter, whatever the pace


def test_a_transformation_that_is_not_known_makes_the_predicted_range_wide() -> None:
    """A loader that waits 30 ms per batch and computes 20 ms, of which reading took 6.4 ms where formats were compared."""
    slow = Diagnosis.of(World(cpu=0.02, blocked=0.03).evidence())
    found = comparison({"tar": 1.0}, now=0.2, cpu=0.01)
    open_end = slow.with_formats(found).remedy("faster storage")
    nothing, much = (
        slow.with_formats(dataclasses.replace(found, transform_cpu=cpu)).remedy("faster storage") for cpu in (0.0, 0.2e-3 * 13.6 / 6.4)
    )
    assert "32 % to 95 % of the CPU of making a batch" not in nothing.formula
    assert "not known: give compare_formats your loader's dataset" in open_end.formula
    assert "not known" not in nothing.formula + much.formula
    assert open_end.low == pytest.approx(much.low)
    assert open_end.speedup == pytest.approx(much.speedup)
    assert open_end.high == pytest.approx(nothing.high, rel=0.1)  # what the noise adds is a share of the middle
    assert nothing.speedup > 1.5 * much.speedup


def test_the_gain_of_faster_storage_does_not_depend_on_the_pace_of_the_probes() -> None:
    """All waiting goes with the slow reading: also what its CPU takes longer beside training than in the probe, and than alone."""
    world = World(cpu=0.01, blocked=0.03)
    evidence = world.evidence()
    assert evidence.loading is not None
    found = dataclasses.replace(comparison({"tar": 1.0}, cpu=0.01), transform_cpu=0.0)
    expected = Diagnosis.of(evidence).with_formats(found).remedy("faster storage").speedup
    probed = dataclasses.replace(evidence.loading, **{name: 0.8 * getattr(evidence.loading, name) for name in ("cpu", "fetch_cpu")})
    alone = {**evidence.arms, "loader": world.arm("loader", "full", world.clean, 0.9 * world.loader)}
    for other in (dataclasses.replace(evidence, loading=probed), dataclasses.replace(evidence, arms=alone)):
        assert Diagnosis.of(other).with_formats(found).remedy("faster storage").speedup == pytest.approx(expected, rel=0.03)


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "jpg": sample["jpg"] * 2}


def slowed(sample: dict[str, Any]) -> int:
    until = time.process_time() + 2e-3
    while time.process_time() < until:
        pass
    return len(sample["jpg"])


def test_a_mapped_source_is_compared_as_it_is_stored_and_its_functions_are_timed(tmp_path: Path) -> None:
    wb.data.write_shards(pictures(20), tmp_path / "now", quiet=True)
    source = wb.data.open_source(tmp_path / "now")
    plain = wb.data.compare_formats(source, ["npy"], rounds=1, folder=tmp_path, quiet=True)
    mapped = wb.data.compare_formats(source.map(doubled).map(slowed), ["npy"], rounds=1, folder=tmp_path, quiet=True)
    assert mapped.payload_bytes == plain.payload_bytes
    assert plain.transform_cpu is None
    assert mapped.transform_cpu is not None
    assert mapped.transform_cpu >= 2e-3
    given = wb.data.compare_formats(source, ["npy"], rounds=1, folder=tmp_path, quiet=True, transform=slowed)
    assert given.transform_cpu is not None
    assert given.transform_cpu >= 2e-3


def as_tensor(sample: dict[str, Any]) -> torch.Tensor:
    """The pixels of a sample, decoded here where they are not stored as an array."""
    return torch.from_numpy(sample["image"] if "image" in sample else decode_picture(sample["jpg"], "a sample").copy())


def measured_gain(
    step: Callable[[Any], None], before: DataLoader[Any], after: DataLoader[Any], turns: int, clock: Callable[[], float]
) -> float:
    """How many times as fast a pass over the second loader is: both in turns, so that what else computes disturbs them alike."""
    ratios = []
    for _ in range(turns):
        took = []
        for loader in (before, after):
            began = clock()
            for batch in loader:
                step(batch)
            took.append(clock() - began)
        ratios.append(took[0] / took[1])
    return statistics.median(ratios[1:])


@pytest.mark.slow
@pytest.mark.alone
def test_the_gain_of_prepared_data_that_a_measured_format_predicts_is_the_gain_of_a_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    drawn = [Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).resize((256, 256)) for _ in range(96)]
    wb.data.write_shards(
        [{"__key__": f"{n}", "jpg": encoded(np.asarray(each), "JPEG", 90)} for n, each in enumerate(drawn)], tmp_path / "a"
    )
    wb.data.convert(tmp_path / "a", tmp_path / "b", format="npy", decode=True, quiet=True)
    raw, ready = (DataLoader(wb.data.open_source(tmp_path / name).map(as_tensor), batch_size=16, shuffle=True) for name in "ab")
    weights = torch.randn(768, 768)

    def step(batch: torch.Tensor) -> None:
        found = batch[:, ::16, ::16].flatten(1).float()
        for _ in range(40):
            found = torch.tanh(found @ weights)

    diagnosed = wb.diagnose(step, raw, budget_s=8)
    assert diagnosed.cause.startswith("dataset code"), diagnosed.why
    compared = wb.data.compare_formats(tmp_path / "a", ["tar"], samples=96, rounds=2, folder=tmp_path, quiet=True)
    remedy = diagnosed.with_formats(compared).remedy("prepared data")
    gain = measured_gain(step, raw, ready, 7, time.process_time)
    assert gain > 1.3
    assert remedy.speedup / gain == pytest.approx(1, abs=0.3), (remedy.speedup, remedy.low, remedy.high, gain)


def as_numbers(sample: dict[str, Any]) -> torch.Tensor:
    """The bytes of a sample as numbers."""
    return torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8)


@pytest.mark.slow
@pytest.mark.alone
def test_a_run_gains_what_a_measured_copy_predicts_of_faster_storage(tmp_path: Path) -> None:
    """Samples on a server of S3 that waits 30 ms before each answer, and the same as tar shards on the local disk."""
    pytest.importorskip("moto")
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("s3fs")
    rng = np.random.default_rng(0)
    wb.data.write_shards([{"__key__": f"{n}", "bin": rng.bytes(4096)} for n in range(64)], tmp_path / "a", quiet=True)
    weights = torch.randn(1024, 1024)

    def step(batch: torch.Tensor) -> None:
        found = batch.float()[:, :1024]
        for _ in range(20):
            found = torch.tanh(found @ weights)

    with s3_beside(0.03) as options:
        files = fsspec.filesystem("s3", **options)
        files.mkdir("bucket")
        files.put(str(tmp_path / "a"), "bucket/a", recursive=True)
        far = wb.data.open_source("s3://bucket/a", storage_options=options)
        near = wb.data.open_source(tmp_path / "a")
        remote, local = (DataLoader(source.map(as_numbers), batch_size=8, shuffle=True) for source in (far, near))
        diagnosed = wb.diagnose(step, remote, budget_s=8)
        assert diagnosed.cause.startswith("storage"), diagnosed.why
        compared = wb.data.compare_formats(remote.dataset, ["tar"], batch_size=8, rounds=2, folder=tmp_path, quiet=True)
        remedy = diagnosed.with_formats(compared).remedy("faster storage")
        gain = measured_gain(step, remote, local, 5, time.perf_counter)
    assert gain > 1.3
    said = remedy.speedup, remedy.low, remedy.high, gain, remedy.formula
    assert remedy.low / ALIKE < gain < remedy.high * ALIKE, said  # the machine may be another while it runs

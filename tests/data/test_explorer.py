"""The DataExplorer shows what its knobs choose: groups with pictures, findings, classes, and the order of an epoch."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ipywidgets", reason="panels need Jupyter's packages (pip install '.[notebooks]')")

import workbench as wb
from tests.drawn import audited
from workbench.data.analysis.data_audit import DataAudit
from workbench.data.panel.explorer import DataExplorer
from workbench.data.samples import folder


@pytest.fixture(scope="module")
def clip_art() -> DataAudit:
    return wb.data.audit(folder("openclipart"), near=False)


def test_groups_are_chosen_by_kind_and_page(clip_art: DataAudit) -> None:
    panel = DataExplorer(clip_art)
    assert panel.page.max == 18  # 138 groups, 8 on a page
    assert len(panel.result) == 8
    first = panel.groups.value
    assert first.count("<img") >= 16
    panel.page.value = 18
    assert len(panel.result) == 2
    assert "2 of 138 groups" in panel.groups.value != first
    panel.kind.value = "conflicting labels"
    assert (panel.page.value, panel.page.max) == (1, 8)
    assert all(len(group.labels) > 1 for group in panel.result)
    panel.kind.value = "leaks between splits"
    assert "no such group" in panel.groups.value
    assert "157" in panel.health.value
    assert "class transportation" in panel.health.value


def test_the_order_of_an_epoch_shows_how_classes_are_mixed(clip_art: DataAudit) -> None:
    by_class = replace(clip_art, order={"": tuple(sorted(clip_art.order[""]))})  # the shards themselves are shuffled
    panel = DataExplorer(by_class)
    mixed = panel.epoch.value
    panel.order.value = "in blocks"
    panel.block.value, panel.window.value = 40, 1
    blocks = panel.epoch.value
    panel.order.value = "as stored"
    stored = panel.epoch.value
    counts = [html.count('title="class ') for html in (mixed, blocks, stored)]
    assert counts[0] > 80 > 2 * counts[1], counts
    assert counts[2] < 40, counts
    assert "batches of 32, as stored" in stored


def test_it_shows_itself_and_what_is_wrong_is_refused() -> None:
    panel = audited().explore()
    assert repr(panel) == "DataExplorer('clip art')"
    bundle = panel._repr_mimebundle_()
    assert "equal by pixels" in bundle["text/html"]
    assert "have no labels" in bundle["text/html"]
    assert DataExplorer(audited(), kind="near").result[0].kind == "near pictures"
    with pytest.raises(ValueError, match=r"DataExplorer\(list\): what wb.data.audit\(data\) gave is allowed, or wb.data.describe"):
        DataExplorer([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"kind='worst': allowed are 'all'"):
        DataExplorer(audited(), kind="worst")


def test_samples_and_shards_of_a_dataset_have_tabs_of_their_own(tmp_path: Path) -> None:
    some = wb.data.open_source(folder("openclipart"))[0:20]
    wb.data.write_shards([{**sample, "cls": n} for n, sample in enumerate(some)], tmp_path / "a", shards=10, quiet=True)
    card = wb.data.describe(tmp_path / "a")
    panel = card.explore()
    assert list(panel.tabs) == ["samples", "shards"]
    assert panel.samples.value.count("<img") == len(card.examples) > 8
    assert "20 samples as tar" in panel.head.value
    assert "1.60× the mean" in panel.shards.value  # 10 shards on 8 readers
    panel.readers.value = 10
    assert "1.00× the mean" in panel.shards.value
    assert panel.shards.value.count("wb-row") == 20
    assert panel.result == ()
    both = DataExplorer(audited(), card=card)
    assert list(both.tabs) == ["findings", "groups", "epoch", "samples", "shards"]
    assert "wb-shards" in both._repr_mimebundle_()["text/html"]
    plain = wb.data.describe([{"txt": "<b>a</b>"}]).explore()
    assert list(plain.tabs) == ["samples"], "without a manifest nobody knows of shards"
    assert "&lt;b&gt;a" in plain.samples.value
    with pytest.raises(ValueError, match=r"DataExplorer\(str\)"):
        DataExplorer(audited(), card="x")  # type: ignore[arg-type]

"""Task of notebook 01: the clip-art sample, read from storage that takes its time. A task of your own looks just like this."""

from dataclasses import replace
from functools import partial

from workbench import Task
from workbench.data.samples import ClipArt
from workbench.train.tasks import clipart_resnet


def build() -> Task:
    """The sample task with 8 ms of EMULATED waiting per picture read; no processor time is used meanwhile."""
    return replace(clipart_resnet(), dataset=partial(ClipArt, storage_latency_s=0.008), name="remote-clipart")

"""What torch's profiler records on the emulated GPU: calls of the runtime, and the device's work, in its events and in its files."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.emulated_ranks import Moment

USUAL_PROFILE = torch.autograd.profiler.profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Something for a trace: a call of the runtime, or work of the device."""

    name: str
    category: str
    start: Moment
    end: Moment
    stream: int | None = None
    """None = a call, on the thread that trains."""
    correlation: int = 0


CLOCK = "emulated device: clock"
"""The mark in a trace by which its clock is known."""


class Moved:
    """An event of Kineto's results at another time, or a record as such an event."""

    def __init__(self, event: Any, start: int, end: int) -> None:
        self._event, self._start, self._end = event, start, end

    def start_ns(self) -> int:
        return self._start

    def duration_ns(self) -> int:
        return max(0, self._end - self._start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)


def _event(record: Record, start: int, end: int, thread: int) -> Moved:
    kind = torch.autograd.DeviceType
    answers = {
        "name": record.name,
        "activity_type": record.category,
        "start_thread_id": thread if record.stream is None else -record.stream,
        "correlation_id": record.correlation,
        "is_user_annotation": False,
        "device_type": kind.CPU if record.stream is None else kind.CUDA,
    }
    return Moved(SimpleNamespace(**{name: partial(_same, answer) for name, answer in answers.items()}), start, end)


def _same(value: Any) -> Any:
    return value


def profiler_of(device: Any) -> type:
    """torch's profiler, whose results have the device's work as well, all by the clock of the program (`time.perf_counter`)."""

    class Profile(USUAL_PROFILE):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "use_device": None})

        def _start_trace(self) -> None:
            super()._start_trace()
            device.records, device.clocks = [], []
            with torch.autograd.profiler.record_function(CLOCK):
                device.compare_clocks()

        def __exit__(self, *error: Any) -> Any:
            device.compare_clocks()
            records, device.records = device.records or [], None
            result = super().__exit__(*error)
            self.clocks = np.array(device.clocks)
            spans = [(record, device.ranks.known(record.start), device.ranks.known(record.end)) for record in records]
            begun = self.clocks[0, 1]
            self.spans = [(record, start - begun, end - begun) for record, start, end in spans if start and end]
            self.plain, self.kineto_results = self.kineto_results, SimpleNamespace(events=self._events)
            return result

        def _moved(self, seconds: float) -> float:
            """From the profiler's clock to the program's, both since CLOCK."""
            real, ours = self.clocks.T - self.clocks[0][:, None]
            beyond = min(0.0, seconds) + max(0.0, seconds - real[-1])
            return float(np.interp(seconds, real, ours)) + beyond

        def _events(self) -> list[Any]:
            events = list(self.plain.events())
            clock = next(event for event in events if event.name() == CLOCK)
            zero, thread = clock.start_ns(), clock.start_thread_id()

            def moved(nanoseconds: int) -> int:
                return zero + round(1e9 * self._moved((nanoseconds - zero) / 1e9))

            theirs = [Moved(event, moved(event.start_ns()), moved(event.start_ns() + event.duration_ns())) for event in events]
            ours = [_event(record, zero + round(1e9 * start), zero + round(1e9 * end), thread) for record, start, end in self.spans]
            return [*theirs, *ours]

        def export_chrome_trace(self, path: str, *arguments: Any, **options: Any) -> None:
            emulated, self.kineto_results = self.kineto_results, self.plain
            super().export_chrome_trace(path, *arguments, **options)
            self.kineto_results = emulated
            content = json.loads(Path(path).read_text())
            events = content["traceEvents"]
            clock = next(event for event in events if event.get("name") == CLOCK)
            zero, host = clock["ts"], (clock["pid"], clock["tid"])
            for event in events:
                if event.get("ph") == "X":
                    start, end = (1e6 * self._moved((at - zero) / 1e6) for at in (event["ts"], event["ts"] + event["dur"]))
                    event |= {"ts": zero + start, "dur": end - start}
            for record, start, end in self.spans:
                pid, tid = host if record.stream is None else (0, 7 + record.stream)
                about = {"correlation": record.correlation} | ({} if record.stream is None else {"device": 0, "stream": tid})
                event = {"ph": "X", "cat": record.category, "name": record.name, "pid": pid, "tid": tid, "args": about}
                events.append({**event, "ts": zero + 1e6 * start, "dur": max(0.0, 1e6 * (end - start))})
            content["deviceProperties"] = [{"id": 0, "name": "an emulated GPU", "totalGlobalMem": device.memory.total}]
            Path(path).write_text(json.dumps(content))

    return Profile

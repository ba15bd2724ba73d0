"""Logs of storages made by hand: a small writer, and a training step in which every kind of memory happens."""

from workbench.memory.analysis.log import ALLOC, FREE, MARK, RESIZE, Event, Mark, MemoryLog, Record

FLOAT = 4


class Writer:
    """Writes a log as a recorder would."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.now = Mark("init", 0, 0)

    def mark(self, phase: str, step: int | None = None, micro: int | None = None) -> None:
        self.now = Mark(phase, self.now.step if step is None else step, self.now.micro if micro is None else micro)
        self.log.events.append(Event(MARK, len(self.log.marks), 0))
        self.log.marks.append(self.now)

    def alloc(self, size: int, op: str = "", module: str = "", category: str | None = None) -> int:
        index = len(self.log.records)
        self.log.events.append(Event(ALLOC, index, size))
        at = len(self.log.events) - 1
        self.log.records.append(Record(size, category, self.now.phase, self.now.step, self.now.micro, module, op, at))
        return index

    def free(self, *indices: int) -> None:
        for index in indices:
            self.log.records[index].freed_at = len(self.log.events)
            self.log.events.append(Event(FREE, index, 0))

    def resize(self, index: int, size: int) -> None:
        self.log.events.append(Event(RESIZE, index, size))
        self.log.records[index].size = max(self.log.records[index].size, size)


def training(batch: int, *, steps: int = 2, micros: int = 1, layers: int = 3, width: int = 256, checkpointed: bool = False) -> MemoryLog:
    """Some steps of a stack of linear layers under Adam; every size is a line in the batch."""
    w = Writer()
    w.log.modules = {"": "Sequential", **{f"layers.{i}": "Linear" for i in range(layers)}}
    weights = [w.alloc(FLOAT * width * width, "aten.empty.memory_format", f"layers.{i}", "parameter") for i in range(layers)]
    assert weights
    act, micro = FLOAT * batch * width, 0
    born = False
    for step in range(steps):
        gradients: list[int] = []
        for _ in range(micros):
            w.mark("data", step, micro)
            x = w.alloc(act, "", "", "input")
            w.mark("forward")
            kept = []
            for i in range(layers):
                scratch = w.alloc(2 * act, "aten.mm.default", f"layers.{i}")
                kept.append(w.alloc(act, "aten.addmm.default", f"layers.{i}"))
                w.free(scratch)
            loss = w.alloc(FLOAT * 8 * batch, "aten._log_softmax.default")
            w.mark("backward")
            above = w.alloc(FLOAT * 8 * batch, "aten._log_softmax_backward_data.default")
            for i in reversed(range(layers)):
                again = [w.alloc(act, "aten.addmm.default", f"layers.{i}")] if checkpointed else []
                below = w.alloc(3 * act, "aten.mm.default")
                if len(gradients) < layers:
                    gradients.append(w.alloc(FLOAT * width * width, "aten.mm.default", "", "gradient"))
                w.free(above, kept.pop(), *again)
                above = below
            w.free(above)
            w.mark("between")
            w.free(loss, x)
            micro += 1
        w.mark("optimizer")
        if not born:
            for i in range(layers):
                w.alloc(2 * FLOAT * width * width, "aten.zeros_like.default", f"layers.{i}", "optimizer_state")
            born = True
        temporary = w.alloc(FLOAT * width * width * layers, "aten._foreach_sqrt.default")
        w.free(temporary)
        w.mark("end")
        w.free(*gradients)
    return w.log

"""Two ranks write and read directories of torch.distributed.checkpoint, as a script does, and what the workbench makes of them."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

import workbench as wb
from tests.scripts.checkpoint_ranks import MODES, Made, agreed, differs
from tests.scripts.sharing import SIZES, next_byte
from workbench.runs.spec import RunSpec
from workbench.train.checkpoints import Checkpoints
from workbench.train.dcp import begin_with
from workbench.train.models import Gpt
from workbench.train.ranks import Ranks
from workbench.train.sharded_tensors import full_tensor


class Script:
    """What a script of a user has: a model that FSDP2 shards, and an optimizer that has taken a step or two."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Gpt(**SIZES)
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.003)
        for _ in range(2):
            torch.autograd.backward(next_byte(self.model, torch.randint(256, (2, 17))))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        save({"app": {"model": model, "optim": optimizer}, "epoch": 3}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
        load(state, checkpoint_id=folder)
        assert state["step"] == 3
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def whole(self) -> dict[str, torch.Tensor]:
        """As `Made.whole` has it."""
        found: dict[str, torch.Tensor] = {}
        for name, weight in self.model.named_parameters():
            states = {f"{name} {kind}": value for kind, value in self.optimizer.state[weight].items()}
            found |= {each: full_tensor(value).detach().clone() for each, value in {name: weight, **states}.items()}
        return found


def main() -> None:
    folder = Path(sys.argv[1])
    ranks = Ranks.join(RunSpec(task="gpt", device="cpu"))
    script, results = Script(seed=1), dict[str, str]()
    script.save(folder / "foreign")
    want = script.whole()
    for mode in sys.argv[2].split("; "):
        run_dir, begun = folder / mode, Made(ranks, 2, MODES[mode])
        if not ranks.rank:
            run_dir.mkdir()
            begin_with(folder / "foreign", run_dir, begun.spec)
        dist.barrier()
        checkpoints = Checkpoints(run_dir, begun.ranks, 3)
        assert checkpoints.resume(begun.trainer, checkpoints.latest()) == 0
        results[f"DCP → {mode}"] = agreed(ranks, differs(want, begun.whole()))
        begun.steps(0, 3)
        checkpoints.write(3, begun.trainer)
        whole = begun.whole()
        if not ranks.rank:
            wb.export_weights(run_dir, folder / f"{mode}.dcp", format="dcp")
            torch.save(whole, folder / f"{mode}.pt")
        dist.barrier()
        reader = Script(seed=2)
        reader.load(folder / f"{mode}.dcp")
        results[f"{mode} → DCP"] = agreed(ranks, differs(whole, reader.whole()))
    if not ranks.rank:
        torch.save(want, folder / "foreign.pt")
        (folder / "out.json").write_text(json.dumps(results))
    ranks.agree(True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

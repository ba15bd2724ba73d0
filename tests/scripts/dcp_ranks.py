"""Ranks write and read directories of torch.distributed.checkpoint, as a script does, and what the workbench makes of them."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import workbench as wb
from tests.scripts.checkpoint_ranks import MODES, Made, agreed, differs
from tests.scripts.sharing import SIZES, next_byte
from workbench.runs.spec import RunSpec
from workbench.train.checkpoints import Checkpoints
from workbench.train.dcp import begin_with
from workbench.train.expert_parallel import expert_layers
from workbench.train.models import Gpt, MoeGpt
from workbench.train.ranks import Ranks
from workbench.train.sharded_tensors import full_tensor


class Script:
    """What a script of a user has: a model that its ranks share, and an optimizer that has taken a step or two."""

    def __init__(self, kind: str, seed: int) -> None:
        """
        Args:
            kind: "fsdp", "hsdp" (two copies), "mixture" (of experts, under FSDP), or "experts": each rank has some of them, as in
                torchtitan, and on four ranks a part of their rows only; FSDP shards the rest.
            seed: of the model.
        """
        torch.manual_seed(seed)
        ranks, names = dist.get_world_size(), ("copy", "shard")
        self.model = MoeGpt(**SIZES) if kind in ("mixture", "experts") else Gpt(**SIZES)
        mesh = init_device_mesh("cpu", (2, ranks // 2) if kind == "hsdp" else (ranks,), mesh_dim_names=names if kind == "hsdp" else None)
        apart = set[nn.Parameter]()
        if kind == "experts":
            of_experts = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("rows", "expert"))
            for _, layer in expert_layers(self.model):
                for name in layer.expert_parameters:
                    whole = getattr(layer, name).detach()
                    setattr(layer, name, nn.Parameter(distribute_tensor(whole, of_experts, [Shard(1), Shard(0)])))
                    apart.add(getattr(layer, name))
        for layer in (*self.model.layers, self.model):
            fully_shard(layer, mesh=mesh, ignored_params=apart)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.003, foreach=False)  # of DTensors of different meshes
        for _ in range(2):
            if apart:  # the exchange of tokens is the script's business: any gradients do for a checkpoint
                for weight in self.model.parameters():
                    weight.grad = weight.detach().cos()
            else:
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
    results = dict[str, str]()
    for kind, modes in json.loads(sys.argv[2]).items():
        script, foreign = Script(kind, seed=1), folder / f"{kind} script"
        script.save(foreign)
        want = script.whole()
        if not ranks.rank:
            torch.save(want, foreign.with_suffix(".pt"))
        for mode in modes:
            run_dir, begun = folder / f"{kind}, {mode}", Made(ranks, ranks.world_size, MODES[mode])
            if not ranks.rank:
                run_dir.mkdir()
                begin_with(foreign, run_dir, begun.spec)
            dist.barrier()
            checkpoints = Checkpoints(run_dir, begun.ranks, 3)
            assert checkpoints.resume(begun.trainer, checkpoints.latest()) == 0
            results[f"{kind} script → {mode}"] = agreed(ranks, differs(want, begun.whole()))
            begun.steps(0, 3)
            checkpoints.write(3, begun.trainer)
            whole = begun.whole()
            if not ranks.rank:
                wb.export_weights(run_dir, run_dir / "dcp", format="dcp")
                torch.save(whole, run_dir / "whole.pt")
            dist.barrier()
            reader = Script(kind, seed=2)
            reader.load(run_dir / "dcp")
            results[f"{mode} → {kind} script"] = agreed(ranks, differs(whole, reader.whole()))
    if not ranks.rank:
        (folder / "out.json").write_text(json.dumps(results))
    ranks.agree(True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Two users train on one machine at once: nothing of one can be read by the other, disturbs it, or stays in folders that they share."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

USERS = (65533, 65534)
SITE, ROOT = sysconfig.get_path("purelib"), Path(__file__).parents[2]
TRAINS = """
import os, sys
import workbench as wb
with open("task.py", "w") as file:
    file.write("import torch, workbench as wb\\n"
        "def build():\\n"
        "    data = torch.utils.data.TensorDataset(torch.zeros(64, 4), torch.zeros(64, 1))\\n"
        "    loss = lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean()\\n"
        "    return wb.Task(model=lambda: torch.nn.Linear(4, 1), dataset=lambda: data, loss=loss)\\n")
run = wb.launch(wb.RunSpec(task="task.py:build", device="cpu", micro_batch=4, steps=4, num_workers=1, nproc_per_node=2, checkpoint_every=2))
run.wait(150, check=True)
print(run.path, flush=True)
"""
LOOKS = """
import sys
import workbench as wb
for what in (lambda: wb.Run.load(sys.argv[1]), lambda: wb.launch(resume=sys.argv[1]), lambda: open(sys.argv[1] + "/run.json")):
    try:
        what()
    except OSError as error:
        assert isinstance(error, PermissionError), repr(error)
    else:
        raise SystemExit("it could be read")
print("private")
"""


def words(user: int, python: str, *more: str) -> list[str]:
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "env", "-i", *more, python]


def environment(home: Path) -> list[str]:
    path = os.pathsep.join([str(ROOT), SITE])
    return [f"HOME={home}", f"PYTHONPATH={path}", "PATH=/usr/bin:/bin", "OMP_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1"]


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter that other users may execute and that has torch."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can act as two users, by setpriv")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        command = [*words(USERS[0], candidate, *environment(Path("/"))), "-c", "import torch, workbench"]
        if os.path.exists(candidate) and not subprocess.run(command, capture_output=True, check=False, cwd="/").returncode:
            return candidate
    pytest.skip("no interpreter here, with torch, may be executed by other users")


@pytest.fixture
def homes() -> Iterator[list[Path]]:
    """A home of each, in a folder that all may enter."""
    shared = Path(tempfile.mkdtemp(dir="/tmp"))
    shared.chmod(0o755)
    made = []
    for user in USERS:
        made.append(shared / str(user))
        made[-1].mkdir(mode=0o755)
        os.chown(made[-1], user, user)
    caches = set(Path("/tmp").glob("torchinductor_*"))
    yield made
    shutil.rmtree(shared)
    for cache in set(Path("/tmp").glob("torchinductor_*")) - caches:
        if cache.lstat().st_uid in USERS:
            shutil.rmtree(cache)


def theirs() -> set[Path]:
    """What belongs to one of the two in the temporary folder, but for torch's own cache, which has the user's name."""
    return {path for path in Path("/tmp").iterdir() if path.lstat().st_uid in USERS and not path.name.startswith("torchinductor_")}


@pytest.mark.slow
def test_two_users_train_at_once_and_see_nothing_of_each_other(python: str, homes: list[Path]) -> None:
    before = theirs()
    both = [
        subprocess.Popen(
            [*words(user, python, *environment(home)), "-c", TRAINS], cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for user, home in zip(USERS, homes, strict=True)
    ]
    said = [process.communicate(timeout=170) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    paths = [Path(out.splitlines()[-1]) for out, _ in said]
    for path, user, other in zip(paths, USERS, reversed(USERS), strict=True):
        assert path.stat().st_mode & 0o777 == 0o700
        assert {file.lstat().st_uid for file in path.rglob("*")} == {user}
        command = [*words(other, python, *environment(Path("/"))), "-c", LOOKS, str(path)]
        looked = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/tmp")
        assert looked.stdout == "private\n", looked.stderr
    assert theirs() == before

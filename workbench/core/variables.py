"""Says which environment variables a run keeps: those that libraries of a training read or its code names, and no secret."""

import re
from collections.abc import Iterable, Mapping

INHERITED = re.compile(
    r"(PET_|TORCHELASTIC_|TORCH_ELASTIC_|WORKBENCH_(RUN|WATCH)|OMPI_|PMI_|PMIX_|JPY_|PYDEVD_).*"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|SLURM_(PROCID|LOCALID|NODEID|GTIDS|TASK_PID)"
    r"|MPLBACKEND|FORCE_COLOR|CLICOLOR_FORCE"
)
"""Variables of the launching process that would lead a run astray. Every option of torchrun is also a variable PET_<OPTION>, and an
inherited PET_NNODES=2 makes it wait for ever; an outer torchrun or Slurm step leaves ranks; a kernel leaves its inline MPLBACKEND."""
_KEPT = re.compile(
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|BLIS|NUMEXPR|DNNL|ONEDNN|ATEN|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|CUDA|CUBLAS|CUBLASLT|CUDNN|NVIDIA|NCCL|RCCL"
    r"|HIP|ROCR|HSA|MIOPEN|GLOO|TP|UCX|FI|MALLOC|GLIBC|LD|PYTHON|HF|TRANSFORMERS|TOKENIZERS|DATASETS|XLA|NUMBA|TF)(_.*)?|PYTHON.+|GLIBC_TUNABLES"
)
"""Variables that libraries of a training read, by the word they begin with."""
_SECRET = re.compile(
    r".*(^|_)(TOKENS?|KEYS?|SECRET|PASS|PASSWORD|PASSWD|PWD|PASSPHRASE|PAT|CREDS?|CREDENTIALS?|AUTH|COOKIE|DSN)(_|$).*"
    r"|.*(PASSWORD|SECRET|APIKEY).*"
)
_WITH_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@]+@")
_NAMED = re.compile(r"""["']([A-Z][A-Z0-9_]{2,63})["']""")
_LONGEST = 2000
_NOT_KEPT = {"PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "OMP_NUM_THREADS"}
"""What each launch sets."""


def is_kept(name: str, source: str = "") -> bool:
    """Is it a variable whose value a run keeps: one that libraries of a training read, or that `source` names, and no secret?

    >>> is_kept("NCCL_ALGO"), is_kept("HF_TOKEN"), is_kept("TOKENIZERS_PARALLELISM"), is_kept("DATA_DIR", "os.environ['DATA_DIR']")
    (True, False, True, True)
    """
    if name in _NOT_KEPT or _SECRET.fullmatch(name) or INHERITED.fullmatch(name):
        return False
    return bool(_KEPT.fullmatch(name)) or name in _NAMED.findall(source)


def kept_variables(environ: Mapping[str, str], source: str) -> dict[str, str]:
    """The variables of an environment that a run keeps, by name: see `is_kept`. PYTHONPATH is always among them, empty if it is not set."""
    kept = {name: value[:_LONGEST] for name, value in sorted(environ.items()) if is_kept(name, source) and not _WITH_PASSWORD.search(value)}
    return {"PYTHONPATH": ""} | kept


def named_variables(environ: Mapping[str, str], sources: Iterable[bytes]) -> dict[str, str]:
    """Those of the variables that a run keeps which the code in `sources` names, and which libraries do not read, by name.

    >>> named_variables({"SLOW": "1", "NCCL_ALGO": "Ring", "HOME": "/h"}, [b"os.getenv('SLOW')", b"os.environ['NCCL_ALGO']"])
    {'SLOW': '1'}
    """
    names = {name for text in sources for name in _NAMED.findall(text.decode("utf-8", errors="replace")) if not _KEPT.fullmatch(name)}
    among = {name: value for name, value in environ.items() if name in names}
    return {name: value for name, value in kept_variables(among, repr(sorted(names))).items() if name in names}

"""The options of `groupax launch slurm`, and the submission of its job script. Imports no jax."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Time limits of sbatch: minutes, minutes:seconds, hours:minutes:seconds, or the same after days and a dash.
_TIME = re.compile(r"\d+(-\d+(:\d+(:\d+)?)?|:\d+(:\d+)?)?")


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Write the job script of a run on several nodes and submit it: groupax launch slurm --nodes 5 -- train ...

    Each node runs one process; the last --server_nodes nodes run `groupax serve` and sample the rollouts."""

    nodes: int = 1
    """Number of nodes of the job, servers included."""
    server_nodes: int = 0
    """Number of nodes that are servers."""
    server_options: str = ""
    """Options of `groupax serve`, e.g. --server_options="--dtype bfloat16"; --model defaults to the program's."""
    server_wait_s: int = 3600
    """Seconds that the servers have to load the model; the trainers start after that."""
    time: str | None = None
    """Time limit, e.g. 12:00:00 or 2-00:00:00, at which the job is requeued to continue."""
    partition: str | None = None
    """SLURM partition."""
    account: str | None = None
    """Account to charge."""
    gres: str | None = None
    """Devices of each node, e.g. gpu:8."""
    cpus: int | None = None
    """CPU cores per node; by default whole nodes with all their memory."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch without leading dashes, e.g. constraint=a100 or mail-type=END."""
    setup: tuple[str, ...] = ()
    """Lines of bash to run first, e.g. "module load cuda"."""
    job_name: str = "groupax"
    """Name of the job and of its output files."""
    restarts: int = 3
    """Maximum number of restarts within a job after a process failed."""
    requeues: int = 1000
    """Maximum number of times that the job is requeued after it saved its state."""
    backoff_s: int = 10
    """Seconds before the first restart; doubled with each restart, up to five minutes."""
    grace_s: int = 60
    """Seconds that the other processes have to end after one has ended, before they are killed."""
    notice_s: int = 300
    """Seconds before the time limit at which the run is asked to save its state."""
    file: Path | None = None
    """File to write; by default JOB_NAME.sbatch in this folder. Replaced if it exists."""
    dry_run: bool = False
    """Write the file without submitting it."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or not 0 <= self.server_nodes < self.nodes:
            raise ValueError(
                f"{self.server_nodes} of {self.nodes} nodes cannot be servers: at least one node has to train; --nodes "
                "counts all nodes"
            )
        for name in ("restarts", "requeues", "backoff_s", "grace_s", "notice_s", "server_wait_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} must be 0 or more, got {getattr(self, name)}")
        if self.cpus is not None and self.cpus < 1:
            raise ValueError(f"--cpus must be at least 1, got {self.cpus}")
        if self.time is not None:
            self._check_time(self.time)
        if not re.fullmatch(r"[\w.+-]+", self.job_name):
            raise ValueError(f"--job_name must consist of letters, digits and . _ + -, got {self.job_name!r}")
        for each in self.sbatch:
            if not re.fullmatch(r"[a-z][\w-]*(=.*)?", each):
                raise ValueError(f"--sbatch takes options such as constraint=a100, got {each!r}")

    def _check_time(self, time: str) -> None:
        if not _TIME.fullmatch(time):
            raise ValueError(f"--time must have a form such as 90, 12:00:00 or 2-00:00:00, got {time!r}")
        if 0 < _seconds(time) <= self.notice_s:
            raise ValueError(
                f"--time {time} leaves no time to train: the run is asked to save its state {self.notice_s} s before "
                "its end; increase --time or decrease --notice_s"
            )


def _seconds(time: str) -> int:
    """Returns the seconds of [days-]hours[:minutes[:seconds]] with days, else of [hours:]minutes[:seconds]."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = parts if len(parts) == 3 else [0, *parts, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def write_script(text: str, file: Path) -> Path:
    """Writes the job script atomically and returns its path.

    Raises:
        ValueError: The file cannot be written.
    """
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", delete=False) as partial:
            path = Path(partial.name)
            partial.write(text)
        path.chmod(0o755)
        path.replace(file)
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror or error}") from error
    return file


def submit(file: Path) -> str:
    """Submits a job script and returns sbatch's answer.

    Raises:
        ValueError: sbatch is not installed, or refuses the job.
    """
    try:
        done = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise ValueError(f"sbatch is not installed here; {file} is written, submit it where SLURM is") from error
    except subprocess.CalledProcessError as error:
        raise ValueError(f"sbatch refused {file}: {error.stderr.strip()}") from error
    return done.stdout.strip()

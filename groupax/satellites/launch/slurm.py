"""The command `groupax launch slurm`: its options, the job script that it writes, and the submission.

The script relies on three facts about SLURM. A `--signal` without "B:" goes to all tasks and not to the script: before
the time limit the trainers receive SIGTERM, save their state and end with status 75, and the job requeues itself.
SIGTERM sent to srun would kill its tasks, so the script never uses it to request a stop. After a node failure or a
preemption by another job, SLURM requeues the job. It waits for its servers by
`python -m groupax.satellites.launch.slurm SECONDS http://host:port ...`. Imports no jax.
"""

import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from groupax.core.errors import PREEMPTED
from groupax.core.settings import environment as env
from groupax.satellites.launch.local import MISTAKE
from groupax.satellites.launch.program import LAUNCHED, option, program_of

# Time limits of sbatch: minutes, minutes:seconds, hours:minutes:seconds, or the same after days and a dash.
_TIME = re.compile(r"\d+(-\d+(:\d+(:\d+)?)?|:\d+(:\d+)?)?")
POLL_S = 2.0


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
    """File to write; by default JOB_NAME.sbatch in this folder."""
    force: bool = False
    """Replace the file if it exists."""
    skip_check: bool = False
    """Write the file without the dry run of groupax train, e.g. where model and data are only on the nodes."""
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


def write_script(text: str, file: Path, *, force: bool = False) -> Path:
    """Writes the job script, in the place of an existing file only by force, and returns its path."""
    try:
        with file.open("w" if force else "x", encoding="utf-8") as script:
            script.write(text)
        file.chmod(0o755)
    except FileExistsError:
        raise ValueError(f"{file} exists; replace it with --force, or give another --file or --job_name") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror or error}") from error
    return file


def submit(file: Path) -> str:
    """Submits a job script and returns sbatch's answer."""
    try:
        done = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise ValueError(f"sbatch is not installed here; {file} is written, submit it where SLURM is") from error
    except subprocess.CalledProcessError as error:
        raise ValueError(f"sbatch refused {file}: {error.stderr.strip()}") from error
    return done.stdout.strip()


def script_of(command: Slurm, argv: Sequence[str]) -> str:
    """Returns the text of the job script.

    Args:
        command: The options.
        argv: The program, as `program_of` takes it.
    """
    trainer = program_of(argv)
    if command.server_nodes and option(argv, "--rollout_servers"):
        raise ValueError("--rollout_servers is set by the job when it has --server_nodes; leave it out")
    if command.server_nodes and argv[0] == "eval":
        raise ValueError("groupax eval samples without servers; leave --server_nodes out")
    server = _server(command, argv) if command.server_nodes else []
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{each}" for each in _sbatch_options(command)),
        "# Written by groupax launch slurm.",
        "set -e",
        *command.setup,
        "set -uo pipefail",
        "",
        *(f"{name}={value}" for name, value in _settings(command).items()),
        f"PYTHON={shlex.quote(sys.executable)}",
        "# shellcheck disable=SC2016 # arguments are literal",
        f"TRAINER=({shlex.join(trainer)})",
        "# shellcheck disable=SC2016",
        f"SERVER=({shlex.join(server)})",
        _body(adds_servers=bool(server) and argv[0] in LAUNCHED[:2]),
    ]
    return "\n".join(lines)


def _settings(command: Slurm) -> dict[str, int]:
    return {
        "NUM_TRAINERS": command.nodes - command.server_nodes,
        "NUM_SERVERS": command.server_nodes,
        "RESTARTS": command.restarts,
        "REQUEUES": command.requeues,
        "BACKOFF_S": command.backoff_s,
        "GRACE_S": command.grace_s,
        "SERVER_WAIT_S": command.server_wait_s,
    }


def _body(adds_servers: bool) -> str:
    return _BODY.format(
        rollout='TRAINER+=(--rollout_servers "${addresses[@]}")' if adds_servers else ":",
        coordinator=env.COORDINATOR,
        num_processes=env.NUM_PROCESSES,
        process_id=env.PROCESS_INDEX,
        api_key=env.API_KEY,
        servers=env.SERVERS,
        preempted=PREEMPTED,
        mistake=MISTAKE,
    )


def _server(command: Slurm, argv: Sequence[str]) -> list[str]:
    try:
        options = shlex.split(command.server_options)
    except ValueError as error:
        raise ValueError(f"--server_options cannot be split into options: {error}") from error
    for name in ("--host", "--port", "--api_key"):
        if option(options, name):
            raise ValueError(f"{name} of the servers is set by the job; leave it out of --server_options")
    model = option(options, "--model") or option(argv, "--model")
    if model is None:
        raise ValueError(
            "the servers have no model to load; give the program a --model, or --server_options='--model MODEL'"
        )
    given = [] if option(options, "--model") else ["--model", model]
    return [sys.executable, "-m", "groupax", "serve", *given, *options, "--host", "0.0.0.0"]


def _sbatch_options(command: Slurm) -> list[str]:
    values: list[tuple[str, object]] = [
        ("job-name", command.job_name),
        ("nodes", command.nodes),
        ("ntasks-per-node", 1),
        ("time", command.time),
        ("partition", command.partition),
        ("account", command.account),
        ("gres", command.gres),
        ("cpus-per-task", command.cpus),
        ("chdir", Path.cwd()),
        ("output", f"{command.job_name}-%j.log"),
        ("open-mode", "append"),
        ("signal", f"TERM@{command.notice_s}"),
    ]
    options = [f"{name}={_quoted(str(value))}" for name, value in values if value is not None]
    all_resources = [] if command.cpus else ["exclusive", "mem=0"]
    extra = [f"{name}{sign}{_quoted(value)}" for name, sign, value in (text.partition("=") for text in command.sbatch)]
    return [*options, "requeue", *all_resources, *extra]


def _quoted(value: str) -> str:
    """Quotes a value for sbatch, which understands quotes and backslashes."""
    if not value.isprintable():
        raise ValueError(f"an option of sbatch must be one line of printable characters, got {value!r}")
    if re.fullmatch(r"[\w.,:;/@%+=\[\]-]*", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


# Braces that belong to bash are doubled.
_BODY = """
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trainers=("${{nodes[@]:0:NUM_TRAINERS}}")
servers=("${{nodes[@]:NUM_TRAINERS}}")
port=$((10000 + 2 * SLURM_JOB_ID % 20000))

addresses=()
if ((NUM_SERVERS)); then
  {api_key}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
  export {api_key}
  for node in "${{servers[@]}}"; do addresses+=("http://$node:$((port + 1))"); done
  SERVER+=(--port "$((port + 1))")
  export {servers}="${{addresses[*]}}"
  {rollout}
fi

# Runs one task on each of these nodes, with all that the job has there. Call it in the background only: srun replaces
# the subshell, so that it receives the signals.
on() {{
  local where="$1" number="$2" label=()
  shift 2
  ((number == 1)) || label=(--label)
  exec srun --nodes="$number" --ntasks="$number" --ntasks-per-node=1 --nodelist="$where" --export=ALL --cpu-bind=none \\
    ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} --wait="$GRACE_S" --kill-on-bad-exit=0 \\
    ${{label[@]+"${{label[@]}}"}} "$@"
}}
listed() {{ local IFS=,; echo "$*"; }}
running() {{ [[ -n "$1" ]] && kill -0 "$1" 2>/dev/null; }}

server_run="" trainer_run=""
end_all() {{
  local run
  for run in "$trainer_run" "$server_run"; do
    if running "$run"; then kill -TERM "$run" 2>/dev/null || true; wait "$run" || true; fi
  done
  server_run="" trainer_run=""
}}
trap end_all EXIT

# Starts the servers, and the trainers once these answer. Returns the status of the trainers, or of a failed server.
attempt() {{
  local status=0 ready_run
  if ((NUM_SERVERS)); then
    {num_processes}=1 {process_id}=0 {coordinator}=localhost:1 \\
      on "$(listed "${{servers[@]}}")" "$NUM_SERVERS" --output="$SLURM_JOB_NAME-%j-servers.log" --open-mode=append \\
      "${{SERVER[@]}}" &
    server_run=$!
    "$PYTHON" -m groupax.satellites.launch.slurm "$SERVER_WAIT_S" "${{addresses[@]}}" &
    ready_run=$!
    wait -n "$server_run" "$ready_run" || status=$?
    if running "$ready_run"; then
      echo "groupax launch: a server ended with status $status before it answered"
      kill "$ready_run"
      return $((status ? status : 1))
    fi
    ((status == 0)) || return "$status"
  fi
  # shellcheck disable=SC2016 # expanded by each task
  {coordinator}="${{nodes[0]}}:$port" {num_processes}=$NUM_TRAINERS \\
    on "$(listed "${{trainers[@]}}")" "$NUM_TRAINERS" \\
    bash -c 'export {process_id}=$SLURM_PROCID; exec "$@"' trainer "${{TRAINER[@]}}" &
  trainer_run=$!
  if [[ -n "$server_run" ]]; then
    wait -n "$trainer_run" "$server_run" || status=$?
    if running "$trainer_run" && ((status)); then
      echo "groupax launch: a server ended with status $status"
      return "$status"
    fi
    status=0
  fi
  wait "$trainer_run" || status=$?
  return "$status"
}}

wait_s=$BACKOFF_S
for ((restart = 0; ; restart++)); do
  status=0
  attempt || status=$?
  end_all
  case $status in
  0 | {mistake}) exit "$status" ;;
  {preempted})
    if ((${{SLURM_RESTART_COUNT:-0}} < REQUEUES)); then
      echo "groupax launch: the state is saved; requeueing the job"
      scontrol requeue "$SLURM_JOB_ID" && sleep 60
    fi
    exit "$status"
    ;;
  esac
  if ((restart >= RESTARTS)); then
    echo "groupax launch: ended with status $status; not restarted again after $restart restarts"
    exit "$status"
  fi
  echo "groupax launch: ended with status $status; restarting in $wait_s s ($((restart + 1)) of $RESTARTS times)"
  sleep "$wait_s"
  wait_s=$((wait_s * 2 < 300 ? wait_s * 2 : 300))
done
"""


def silent_servers(addresses: Sequence[str], timeout_s: float) -> list[str]:
    """Waits until all servers answer, and returns those that have not when the time is over.

    Args:
        addresses: Addresses of servers, as http://host:port; each is asked for /health.
        timeout_s: Longest time to wait.
    """
    deadline_s = time.monotonic() + timeout_s
    silent = list(addresses)
    while True:
        silent = [address for address in silent if not _answers(address)]
        if not silent or time.monotonic() >= deadline_s:
            return silent
        time.sleep(POLL_S)


def _answers(address: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{address}/health", timeout=10) as response:
            return response.status == 200
    except OSError:
        return False


def main(timeout_s: float, addresses: Sequence[str]) -> int:
    """Returns the exit status: 0 if all servers answer."""
    silent = silent_servers(addresses, timeout_s)
    if silent:
        print(f"groupax launch: no answer in {timeout_s:g} s from {', '.join(silent)}; see its log", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))

"""The strictest set-up: annotated shapes are checked, dtypes and ranks do not promote, warnings are errors."""

import builtins
import functools
import gc
import hashlib
import os
import subprocess
import threading

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
os.environ["WANDB_MODE"] = "offline"


def one_at_a_time(function):
    """The function, called by one thread at a time, and not by what the collection of garbage calls."""
    lock = threading.RLock()

    @functools.wraps(function)
    def alone(*args, **kwargs):
        with lock:
            collects = gc.isenabled()
            gc.disable()
            try:
                return function(*args, **kwargs)
            finally:
                if collects:
                    gc.enable()

    return alone


# Until 3.11.8 Python counts how deep syntax trees are for all threads together and fails when it comes out wrong
# (python/cpython#106905). The hooks below parse whatever is imported, also what trackers' and rewards' threads import,
# and so do tracebacks, such as that of a task which is collected while its exception was never retrieved.
builtins.compile = one_at_a_time(compile)

from pathlib import Path

from beartype import BeartypeConf
from beartype.claw import beartype_packages
from jaxtyping import install_import_hook

PACKAGE = Path(__file__).parents[1] / "groupax"


def commit():
    """The checked out commit, or "" outside of a repository."""
    run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PACKAGE, capture_output=True, text=True)
    return run.stdout.strip()[:8]


SEED = os.environ.get("TEST_SEED") or commit()


def drawn_number(name):
    """A number from 0 to 255 that a seed gives a name."""
    return hashlib.sha256(f"{SEED} {name}".encode()).digest()[0]


# Beartype's hook takes no asynchronous __call__ and no imports for types alone, and checks wrappers by what they wrap.
OUT_OF_REACH = "cli", "compat", "serve", "view"


def rooms():
    """The rooms and modules of the package for jaxtyping, and those for beartype: half of all, drawn by the seed."""
    found = {True: [], False: []}
    for path in sorted([*PACKAGE.glob("[!_]*"), *PACKAGE.glob("core/[!_]*"), *PACKAGE.glob("satellites/[!_]*")]):
        if path.stem in ("core", "satellites") or (SEED != "all" and drawn_number(path.stem) % 2):
            continue
        modules = [path] if path.suffix == ".py" else [*path.rglob("*.py")]
        has_shapes = any("jaxtyping" in module.read_text() for module in modules)
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found[has_shapes or path.stem in OUT_OF_REACH].append(name)
    return found[True], found[False]


# jaxtyping compares the shapes of all arguments of a call, for which it takes ten times as long as beartype for types:
# together a fifth of the time, which `make test` leaves to the other targets.
if os.environ.get("CHECK_TYPES", "1") == "1":
    with_arrays, others = rooms()
    install_import_hook(with_arrays, "beartype.beartype")
    beartype_packages(others, conf=BeartypeConf(claw_is_pep526=False))

import jax

if "JAX_NUM_CPU_DEVICES" not in os.environ:
    jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_traceback_in_locations_limit", 0)  # where operations come from; a tenth of the time of tracing

import numpy as np
import pytest

SHARED = Path(__file__).parents[2] / "shared"
TINY = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
# Latent attention and experts of a DeepSeek V3 of these sizes.
LATENTS = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


SHARED_RUNS = {"earlier", "logged", "run", "tracked", "whole"}  # fixtures of modules, each a run of the trainer
HEAVY_RUNS = {"logged", "tracked", "whole"}  # of these, the ones that take long to make


def pytest_report_header():
    return f"cases of tests marked drawn: those of TEST_SEED={SEED} (TEST_SEED=all runs all of them)"


def undrawn(items):
    """The items that are not run: all but `n` cases of each test marked `drawn(n)`, chosen by a hash with the seed.

    With a name, as in `drawn(n, "resume")`, the cases are all tests that have the same mark, in whatever module.
    """
    cases = {}
    for item in items:
        if SEED != "all" and (mark := item.get_closest_marker("drawn")):
            where = mark.args if len(mark.args) > 1 else (*mark.args, item.path, item.originalname)
            kinds = [item.get_closest_marker(each) is None for each in ("heavy", "parity", "optimized", "long")]
            cases.setdefault((*where, *kinds), []).append(item)
    for (number, *_), group in cases.items():
        yield from sorted(group, key=lambda item: drawn_number(item.nodeid))[number:]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Draws cases; tests that look at the same run go to one worker: it is made once."""
    left_out = {*undrawn(items)}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        for name in SHARED_RUNS.intersection(item.fixturenames):
            if not item.get_closest_marker("xdist_group"):
                item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{name}"))
        if HEAVY_RUNS.intersection(item.fixturenames):
            item.add_marker(pytest.mark.heavy)


def rest_heavy(cases, quick=1, drawn=1):
    """Cases of a parametrized test: the first `quick`, and `drawn` of the others, which are heavy."""
    rest = [case if isinstance(case, tuple) else (case,) for case in cases[quick:]]
    marks = [pytest.mark.heavy, pytest.mark.drawn(drawn)]
    return [*cases[:quick], *(pytest.param(*case, marks=marks) for case in rest)]


def pytest_terminal_summary(terminalreporter):
    """Adds the seconds of each test to the file that TEST_TIMES names; `.ci/run` prints the slowest."""
    if path := os.environ.get("TEST_TIMES"):
        reports = [
            each
            for key in ("passed", "failed", "error", "")
            for each in terminalreporter.stats.get(key, [])
            if hasattr(each, "duration")
        ]
        with Path(path).open("a") as file:
            file.writelines(f"{each.duration:.2f} {each.nodeid} {each.when}\n" for each in reports)


def one_device_mesh():
    """The first device alone, for what compiles once per test."""
    from groupax.parallel.mesh import AXES, make_mesh

    return jax.sharding.Mesh(make_mesh().devices.reshape(-1)[:1].reshape((1,) * len(AXES)), AXES)


MAX_BYTES, MAX_MAPS = 2.5e9, 20_000  # of a worker; Linux allows a process 65,530 maps


@pytest.fixture(scope="module", autouse=True)
def _programs_are_given_back():
    """Compiled programs of a whole suite take gigabytes; many modules use the same ones."""
    yield
    num_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > MAX_BYTES or Path("/proc/self/maps").read_text().count("\n") > MAX_MAPS:
        jax.clear_caches()


TRACED = tuple(f"groupax.{room}." for room in ("engine", "models", "objective", "parallel", "rewards", "training"))


@pytest.fixture
def monkeypatch(monkeypatch):
    """Programs that were traced while a part of them was replaced serve no other test."""
    yield monkeypatch
    owners = {getattr(owner, "__module__", None) or owner.__name__ for owner, *_ in monkeypatch._setattr}
    if any(f"{owner}.".startswith(TRACED) for owner in owners):
        jax.clear_caches()


@pytest.fixture(scope="session")
def stories() -> Path:
    """The real 260K-parameter story model; tests that need it skip where it is not."""
    folder = SHARED / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder


@pytest.fixture(scope="session")
def tiny_model():
    """A random two-layer model on all four devices."""
    from groupax import init_model

    return init_model(TINY, seed=0)


def steps_started(trainer):
    """Trains, and returns the number of updates before each step: the first is not 0 if the run was resumed."""
    from groupax.events import StepStarted

    started = []
    trainer.listeners = [lambda event: started.append(event.step) if isinstance(event, StepStarted) else None]
    trainer.train()
    return started


def assert_trees_match(one, other, **bounds):
    """Compares the arrays of two trees, which are equal if no bounds of `assert_allclose` are given."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, **bounds) if bounds else np.testing.assert_array_equal(a, b)

"""Checks of kernels that are broken in one way each, for `groupax.models.kernels.check`."""

import os
import time
from dataclasses import replace

import jax
import jax.numpy as jnp

from groupax.models.kernels.check import EMULATED, Case, Check

[MATMUL] = [check for check in EMULATED if check.kernel == "grouped_matmul"]
[CASE] = [case for case in MATMUL.cases(True) if "bfloat16" in case.name]


def hangs(*_):
    time.sleep(600)


def raises(*_):
    raise NotImplementedError("no such instruction")


def dies(*_):
    os._exit(11)


BROKEN = {
    "wrong": lambda rows, weights: CASE.kernel(rows, weights) * 1.01,
    "nan": lambda rows, weights: CASE.kernel(rows, weights).at[3, 4].set(jnp.nan),
    "raises": raises,
    "dies": dies,
    "hangs": hangs,
    "right": CASE.kernel,
}


def check(name, form):
    def cases(_):
        yield Case(name, form, CASE.plain, CASE.arrays, CASE.dtype)

    return Check(name, MATMUL.is_for, cases, is_emulated=True)


CHECKS = [check(name, form) for name, form in BROKEN.items()]


def slow(rows, weights):
    out = CASE.plain(rows, weights)
    return jax.pure_callback(lambda x: (time.sleep(0.2), x)[1], out, out)


SLOW = replace(CASE, name="slow", kernel=slow, has_gradient=False, is_timed=True)

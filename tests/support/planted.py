"""Dumps of models that are made on the spot, and tokens whose columns a test states."""

import functools
import math

import torch

from three_policies.doctor import plants, sides
from three_policies.doctor.dumps import response
from three_policies.doctor.tokens import Tokens

MODELS = ("Qwen2", "Mixtral", "Gemma2")


@functools.cache
def model(architecture):
    return sides.subject(3, architecture)


def responses(rows):
    return [response(line, row) for line, row in enumerate(rows, 1)]


@functools.cache
def planted(cause, architecture="Qwen2", variant=None, second=None, severity=0.7):
    rows = plants.plant(model(architecture), cause, 3, severity, variant, False, second, groups=10)
    return responses(rows)


def names(report):
    return [finding.cause for finding in report.causes]


def tokens(mu, pi, **columns):
    n = len(mu)
    whole = torch.zeros(n, dtype=torch.long)
    given = {"row": whole, "t": torch.arange(n), "start": whole, "ids": whole, "last": whole > 0,
             "prefix": torch.arange(n), "seen": whole > 0, "known": whole > 0, "version": whole,
             "entropy": torch.full((n,), math.nan, dtype=torch.float64)}
    return Tokens(mu, pi, **given | columns)


def in_rows(n, length):
    """Return the columns of n tokens in responses of one length; by default they are one."""
    return {"t": torch.arange(n) % length, "row": torch.arange(n) // length}


def shifted(odds, by):
    """Return log-probs of two columns whose log-odds are these, and that much more."""
    return [torch.nn.functional.logsigmoid(x) for x in (odds, odds + by)]

"""TRL's trainer is a fixture of every file here."""

from three_policies.tests.support.trl_stub import trainer  # noqa: F401

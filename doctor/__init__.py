"""Why two log-probs of one token differ: `examine` a dump, `diagnose` a run's metrics."""

from three_policies.doctor.health import diagnose
from three_policies.doctor.report import Report, examine

__all__ = ["Report", "diagnose", "examine"]

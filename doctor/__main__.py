"""python -m three_policies.doctor DUMP is three-policies doctor DUMP."""

import sys

from three_policies.doctor.command import main

sys.exit(main())

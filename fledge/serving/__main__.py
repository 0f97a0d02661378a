"""`python -m fledge.serving …`: the same as `fledge serve …`, without the other commands."""

import sys

from fledge.errors import UserError, printable
from fledge.serving.launch import launch

try:
    launch(sys.argv[1:])
except UserError as error:
    print(f"fledge: {printable(' '.join(str(error).split()))}", file=sys.stderr)
    sys.exit(1)

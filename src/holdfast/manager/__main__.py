"""`python -m holdfast.manager`."""

import os
import sys

if "--detach" in sys.argv[1:]:
    # Whoever started this does not have a manager for a child. Before anything else is imported, so that it is quick.
    if os.fork():
        os._exit(0)
    os.setsid()

from holdfast.manager.command import main

sys.exit(main(sys.argv[1:]))

"""``python -m kvferry.daemon``: before anything else is imported, which takes a while, signals are held back.

And other processes are kept out: the descriptors of pools that a service manager has stored are open already. Engines
wait for the imports, so nothing is collected meanwhile (see ``garbage``), and structlog is kept from importing rich:
the daemon writes tracebacks without it.
"""

import gc
import os
import sys

if __name__ == "__main__":
    gc.disable()
    sys.modules["rich"] = None  # type: ignore[assignment]  # importing it raises then, as if it were not installed
    from kvferry.daemon.process.inspection import forbid_inspection, report_faults
    from kvferry.daemon.process.signals import ENDING, IGNORED, hold_back
    from kvferry.daemon.process.succession import VARIABLE

    del sys.modules["rich"]
    forbid_inspection()
    # A successor has sockets and memory to give back; libraries start threads as soon as they are imported.
    hold_back((*IGNORED, *ENDING) if VARIABLE in os.environ else IGNORED)
    report_faults()
    from kvferry.daemon.daemon import main

    sys.exit(main())

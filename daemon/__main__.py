"""``python -m kvferry.daemon``: before anything else is imported, which takes a while, signals are held back.

And other processes are kept out: the descriptors of pools that a service manager has stored are open already.
"""

import sys

from kvferry.daemon.process.inspection import forbid_inspection, report_faults
from kvferry.daemon.process.signals import hold_back

if __name__ == "__main__":
    forbid_inspection()
    hold_back()
    report_faults()
    from kvferry.daemon.daemon import main

    sys.exit(main())

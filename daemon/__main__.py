"""``python -m kvferry.daemon``: signals are held back before anything else is imported, which takes a while."""

import sys

from kvferry.daemon.process.signals import hold_back

if __name__ == "__main__":
    hold_back()
    from kvferry.daemon.daemon import main

    sys.exit(main())

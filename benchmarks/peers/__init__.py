"""Other projects' own functions as peers: taken at run time from what ``make peers`` installed, never copied here."""

"""``kvferry doctor``: what a host has and lacks for kvferry, each with the fix. Looks only; changes nothing."""

if __name__ != "kvferry.clients.cli.doctor":
    raise ImportError(f"import kvferry.clients.cli.doctor, not {__name__}: that would be a second copy of it")

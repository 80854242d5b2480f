"""``kvferry doctor``: what a host has and lacks for kvferry, each with the fix. Looks only; changes nothing."""

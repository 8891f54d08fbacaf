"""`loadgen selftest`: is this generator, on this machine, right? Against a scripted server that logs its own truth."""

"""Private servers for tests and benchmarks: real ones, on free ports of the loopback, in temporary folders, stopped again."""

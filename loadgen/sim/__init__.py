"""The simulated server: behaves like an engine in time and memory, answers the graded tasks, breaks on cue."""

"""Soak testing of LLM inference servers: load, evidence and judgement."""

__version__ = "0.1.0"

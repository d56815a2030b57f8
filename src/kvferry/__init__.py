"""kvferry: serve language models with prefill and decode on separate instances."""

__version__ = "0.1.0"

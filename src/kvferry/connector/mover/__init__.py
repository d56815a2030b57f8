"""The one thread that executes effects and reports events."""

"""What people and monitoring see of a process: log lines and metrics."""

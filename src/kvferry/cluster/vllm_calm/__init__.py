"""A folder for PYTHONPATH of vLLM processes that share few cores; no package for imports."""

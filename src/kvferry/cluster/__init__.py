"""Starts, watches and stops the processes of a deployment on this machine.

Knows command lines, ready files, cores and signals; knows nothing of models, HTTP or KV.
"""
